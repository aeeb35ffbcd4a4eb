"""Mends JSON in which a client has cut an emoji in two, so that it holds escaped halves of surrogate pairs.

The work grows with the text alone, whatever stands in it. It is done piece by piece, as a search for a pattern keeps
every other thread waiting until it ends.
"""

import re

_HEX = rb"[0-9a-fA-F]{2}"
_HIGH, _LOW = rb"\\u[dD][89abAB]" + _HEX, rb"\\u[dD][c-fC-F]" + _HEX
_HALVES = re.compile(
    rb"\\u[dD](?:[89abAB]" + _HEX + rb"(?!" + _LOW + rb")|[c-fC-F]" + _HEX + rb"(?<!" + _HIGH + _LOW + rb"))"
)
"""A half without its other half, in JSON without escaped backslashes."""
_PAIR = re.compile(_HIGH + _LOW)
_ESCAPE_BYTES = 6
PIECE_BYTES = 1 << 20
"""Bytes that are searched at a time, which takes up to 30 ms."""


def well_formed(text: bytes, piece: int = PIECE_BYTES) -> bytes:
    """JSON with U+FFFD for each escaped half of a surrogate pair. `piece`: bytes searched at a time, at least 12."""
    if (b"\\ud" not in text and b"\\uD" not in text) or b"\0" in text:  # JSON has no NUL
        return text
    marked = text.replace(b"\\\\", b"\0\0")  # from now on every backslash begins an escape
    mended, start = bytearray(), 0
    while start < len(marked):
        end = _end_of_piece(marked, start + piece)
        mended += _HALVES.sub(rb"\\ufffd", marked[start:end])
        start = end
    return bytes(mended).replace(b"\0\0", b"\\\\")


def _end_of_piece(marked: bytes, end: int) -> int:
    """Where a piece may end, from here backwards: in no escape, and between no two halves of a pair."""
    if end >= len(marked):
        return len(marked)
    escape = marked.rfind(b"\\", end - _ESCAPE_BYTES + 1, end)
    end = end if escape < 0 else escape
    return end - _ESCAPE_BYTES if _PAIR.match(marked, end - _ESCAPE_BYTES) else end
