"""Prompts as the JSON lists that the engine takes, without encoding the ids of a long history again for each call."""

from array import array
from threading import Lock

import msgspec

KEPT = 4
"""Paths whose lists are kept, as a conversation may have parallel branches; about 5 bytes per token."""


class IdListCache:
    """The JSON lists of one attempt's newest paths. A prompt that begins with one of them only encodes its further ids.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._by_completion: dict[int, tuple[int, bytes]] = {}
        """Completion -> the length of its path, and the JSON list without its closing bracket."""
        self._adding = Lock()  # two threads that evict at once could both delete the same oldest entry

    def write(self, ids: "array[int]", base: int | None, shared: int) -> bytes:
        """Encode the ids; the first `shared` of them are the first of the path of the completion `base`."""
        size, text = self._by_completion.get(base or -1, (0, b"["))
        if size > shared:
            size, text = 0, b"["
        return text + _encoded(ids[size:], after_others=size > 0) + b"]"

    def add(self, id: int, path: "array[int]", prompt: bytes, length: int) -> None:
        """Keep a completion's path: `prompt` is the list that `write` gave for its first `length` ids."""
        text = prompt[:-1] + _encoded(path[length:], after_others=length > 0)
        with self._adding:
            self._by_completion[id] = len(path), text
            while len(self._by_completion) > KEPT:
                del self._by_completion[next(iter(self._by_completion))]


def _encoded(ids: "array[int]", after_others: bool) -> bytes:
    """The ids with commas and without brackets."""
    return b"," * (after_others and len(ids) > 0) + msgspec.json.encode(ids.tolist())[1:-1]
