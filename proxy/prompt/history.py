"""What stands before each turn of a request, as digests: a reply is continued only where its own history goes before.

Reasoning does not count, as agents drop that of older turns; neither do ids, as some give their own. Left out: texts of
system or user that an agent rewrites on its way; what follows those is a new conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import chain
from typing import Any

from proxy.call import meaning
from proxy.pool.completions.records import History

KEPT = 4
"""Requests whose messages are kept, as several lines of a conversation may go on side by side."""


@dataclass(frozen=True)
class Turn:
    """An assistant turn of a request: its place, what it says, and what stands before it."""

    index: int
    said: tuple[Any, ...]
    history: History


@dataclass(frozen=True)
class Asked:
    """A request's messages, its assistant turns, and the history of the turn that it asks for."""

    messages: tuple[dict[str, Any], ...]
    """Where an earlier request had the same message at this place, that one's very object."""
    turns: list[Turn]
    history: History


@dataclass(frozen=True)
class _Message:
    """A message as it was read at its place."""

    value: dict[str, Any]
    calls: str
    """Its tool calls in writing: Python holds 1, 1.0 and True, and objects in any order, for equal."""
    turn: Turn | None
    sender: bytes
    said: bytes
    """A digest of it."""


class _Digests:
    """Of all messages so far, and of the same without tool results."""

    def __init__(self) -> None:
        self._whole, self._outline = blake2b(digest_size=8), blake2b(digest_size=8)

    def add(self, message: _Message) -> None:
        self._whole.update(message.sender + message.said)
        self._outline.update(message.sender if message.value["role"] == "tool" else message.sender + message.said)

    def copy(self) -> "_Digests":
        copied = _Digests.__new__(_Digests)
        copied._whole, copied._outline = self._whole.copy(), self._outline.copy()
        return copied

    def history(self) -> History:
        return History(*(int.from_bytes(state.digest(), "little") for state in (self._whole, self._outline)))


_Line = tuple[list[_Message], _Digests]
"""The messages of one request, and the digests of them all. Neither changes any more."""


class Histories:
    """Reads the requests of one attempt; of a conversation that goes on, what is new in it. Safe from any thread."""

    def __init__(self) -> None:
        self._lines: tuple[_Line, ...] = ()  # the newest first

    def read(self, messages: Sequence[dict[str, Any]]) -> Asked:
        line = next((line for line in self._lines if _begins(messages, line[0])), None)
        if line is not None:
            read, digests = line[0].copy(), line[1].copy()
        else:
            read = max((_common(known, messages) for known, _ in self._lines), key=len, default=[])
            digests = _Digests()
            for message in read:
                digests.add(message)
        for i in range(len(read), len(messages)):
            read.append(_read(messages[i], i, digests))
            digests.add(read[-1])
        self._lines = ((read, digests), *(other for other in self._lines if other is not line))[:KEPT]
        turns = [message.turn for message in read if message.turn is not None]
        return Asked(tuple(message.value for message in read), turns, digests.history())


def _read(message: dict[str, Any], index: int, before: _Digests) -> _Message:
    turn = None
    if message["role"] == "assistant":
        said = meaning(message)
        turn = Turn(index, said, before.history())
        text = "".join(f"{len(part)}:{part}" for part in (said[0], *chain.from_iterable(said[2])))
    else:
        text = message.get("content") or ""
    sender = f"{message['role']} {message.get('name')} ".encode("utf-8", "surrogatepass")
    digest = sha256(text.encode("utf-8", "surrogatepass")).digest()  # processors have instructions for it
    return _Message(message, _calls(message), turn, sender, digest)


def _begins(messages: Sequence[dict[str, Any]], line: list[_Message]) -> bool:
    """Whether these messages are those of the line, or go on from them. The last one tells lines apart soonest."""
    last = len(line) - 1
    return len(messages) > last and _same(line[last], messages[last]) and len(_common(line, messages)) > last


def _common(line: list[_Message], messages: Sequence[dict[str, Any]]) -> list[_Message]:
    """The leading messages that both have."""
    pairs = enumerate(zip(line, messages, strict=False))
    return line[: next((i for i, (one, other) in pairs if not _same(one, other)), min(len(line), len(messages)))]


def _same(known: _Message, message: dict[str, Any]) -> bool:
    return known.value == message and known.calls == _calls(message)


def _calls(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return repr(calls) if calls else ""
