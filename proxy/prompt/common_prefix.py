"""How far two lists of token ids are the same: arrays of one type are compared without making an object of each id."""

from array import array

BLOCK = 4096
"""Ids that are copied and compared at a time: few enough to stay in the processor's cache."""


def shared(a: "array[int]", b: "array[int]", most: int, least: int = 0) -> int:
    """How many leading ids are equal: of `a` the first `most` count, and the first `least` are known to be equal."""
    low, high, step = least, min(most, len(a), len(b)), BLOCK
    while low < high:
        end = min(low + step, high)
        if a[low:end] == b[low:end]:
            low = end
        else:
            high, step = end - 1, max(1, (end - low) // 2)
    return low
