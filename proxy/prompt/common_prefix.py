"""The length of the common prefix of two token lists, compared without making a Python object of each id."""

from array import array

BLOCK = 4096
"""Ids copied and compared at a time: few enough to stay in the processor's cache."""


def common_length(a: "array[int]", b: "array[int]", most: int, least: int = 0) -> int:
    """How many leading ids are equal, looking at the first `most` of `a`; the first `least` are known to be equal.

    Compares blocks, then halves the first block that differs.
    """
    low, high, step = least, min(most, len(a), len(b)), BLOCK
    while low < high:
        end = min(low + step, high)
        if a[low:end] == b[low:end]:
            low = end
        else:
            high, step = end - 1, max(1, (end - low) // 2)
    return low
