"""Prompts as the JSON lists that the engine takes, without writing the ids of a long history again for each call.

The lists of an attempt's newest paths are kept; a prompt that begins with one of them only adds its further ids.
"""

from array import array
from threading import Lock

import msgspec

KEPT = 4
"""Paths whose lists are kept, as several lines of a conversation may go on side by side; about 5 bytes per token."""


class IdLists:
    """Of one attempt. Safe from any thread."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, bytes]] = {}  # by completion: its path's length, and list without `]`
        self._adding = Lock()

    def write(self, ids: "array[int]", base: int | None, shared: int) -> bytes:
        """The ids as a JSON list. The first `shared` of them are those of the path of the completion `base`."""
        size, text = self._known.get(base or -1, (0, b"["))
        if size > shared:
            size, text = 0, b"["
        return text + _further(ids[size:], size > 0) + b"]"

    def add(self, id: int, path: "array[int]", prompt: bytes, length: int) -> None:
        """A completion's path: its prompt as written, of so many ids, and what was sampled."""
        written = prompt[:-1] + _further(path[length:], length > 0)
        with self._adding:
            self._known[id] = len(path), written
            while len(self._known) > KEPT:
                del self._known[next(iter(self._known))]


def _further(ids: "array[int]", behind: bool) -> bytes:
    """What the ids add to a list, `behind` others."""
    return b"," * (behind and len(ids) > 0) + msgspec.json.encode(ids.tolist())[1:-1]
