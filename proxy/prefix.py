"""How far two lists of token ids are the same: in bytes, because only these are compared by memcmp."""

from array import array


def shared(a: "array[int]", b: "array[int]", most: int, least: int = 0) -> int:
    """How many leading ids are equal: of `a` the first `most` count, and the first `least` are known to be equal."""
    low, high = least, min(most, len(a), len(b))
    one, other = memoryview(a).cast("B"), memoryview(b).cast("B")
    if one[low * 4 : high * 4] == other[low * 4 : high * 4]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * 4 : middle * 4] == other[low * 4 : middle * 4]:
            low = middle
        else:
            high = middle - 1
    return low
