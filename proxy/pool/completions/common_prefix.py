"""The length of the common prefix of two token lists, compared without making a Python object of each id."""

from collections.abc import Sequence
from typing import Any

BLOCK = 4096
"""Ids copied and compared at a time: few enough to stay in the processor's cache."""


def common_length(a: Sequence[Any], b: Sequence[Any], most: int | None = None, least: int = 0) -> int:
    """How many leading ids (or characters) are equal; the first `least` are known to be equal.

    `most`: how many of `a` to look at; None: all. Compares blocks, then halves the first block that differs.
    """
    low, high, step = least, min(len(a) if most is None else most, len(a), len(b)), BLOCK
    while low < high:
        end = min(low + step, high)
        if a[low:end] == b[low:end]:
            low = end
        else:
            high, step = end - 1, max(1, (end - low) // 2)
    return low
