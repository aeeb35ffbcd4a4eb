"""What stands before each assistant turn of a request, as digests: only a reply to an equal history is continued.

Reasoning does not count, because agents drop that of older turns; neither do call ids, because some agents make their
own. Left out: system or user texts that an agent rewrites later; what follows those is a new conversation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import chain
from sys import getsizeof
from typing import Any

from proxy.pool.completions.records import HistoryDigest
from proxy.prompt.continuation.meaning import meaning

KEPT = 4
"""Requests whose messages are kept, as a conversation may have parallel branches."""
MOST_BYTES = 1 << 26
"""Memory of one attempt's kept messages: a context of a million tokens several times over. Older requests go first."""


@dataclass(frozen=True)
class RequestTurn:
    """An assistant turn of a request: its place, what it says, and what stands before it."""

    index: int
    meaning: tuple[Any, ...]
    history: HistoryDigest


@dataclass(frozen=True)
class RequestHistory:
    """A request's messages, its assistant turns, and the history of the turn that it asks for."""

    messages: tuple[dict[str, Any], ...]
    """Where an earlier request had the same message at this place, this is that very object."""
    turns: list[RequestTurn]
    history: HistoryDigest


@dataclass(frozen=True)
class _ReadMessage:
    """A message as it was read at its place."""

    value: dict[str, Any]
    calls: str
    """Its tool calls as text: Python takes 1, 1.0 and True, and objects in any order, for equal."""
    turn: RequestTurn | None
    sender: bytes
    digest: bytes
    """Digest of what it says."""
    size: int
    """Bytes of memory that it takes."""


class _Digests:
    """Running digests of all messages so far: of everything, and of everything but tool results."""

    def __init__(self) -> None:
        self._whole, self._outline = blake2b(digest_size=8), blake2b(digest_size=8)

    def add(self, message: _ReadMessage) -> None:
        self._whole.update(message.sender + message.digest)
        self._outline.update(message.sender if message.value["role"] == "tool" else message.sender + message.digest)

    def copy(self) -> "_Digests":
        copied = _Digests.__new__(_Digests)
        copied._whole, copied._outline = self._whole.copy(), self._outline.copy()
        return copied

    def history(self) -> HistoryDigest:
        return HistoryDigest(*(int.from_bytes(state.digest(), "little") for state in (self._whole, self._outline)))


_ReadRequest = tuple[list[_ReadMessage], _Digests]
"""The messages of one request, and the digests of them all. Neither changes any more."""


@dataclass(frozen=True)
class _Kept:
    """Requests that are kept, and the bytes of their messages; those that requests share count once."""

    requests: tuple[_ReadRequest, ...] = ()
    """The newest first."""
    size: int = 0


class HistoryReader:
    """Reads the requests of one attempt; of a conversation that goes on, only the new messages. Any thread may use it.

    Without a lock: what is kept is replaced as a whole. Of two threads that replace it at once, one's
    request is forgotten, which costs reading those messages again.
    """

    def __init__(self) -> None:
        self._kept = _Kept()

    @property
    def size(self) -> int:
        """Bytes of the messages that are kept, `MOST_BYTES` at the most."""
        return self._kept.size

    def read(self, messages: Sequence[dict[str, Any]], remember: bool = True) -> RequestHistory:
        """Read a request. `remember=False` keeps none of it for later ones."""
        kept = self._kept.requests
        earlier = next((request for request in kept if _continues(messages, request[0])), None)
        if earlier is not None:
            read, digests = earlier[0].copy(), earlier[1].copy()
        else:
            read = max((_common(request, messages) for request, _ in kept), key=len, default=[])
            digests = _Digests()
            for message in read:
                digests.add(message)
        for index in range(len(read), len(messages)):
            read.append(_read(messages[index], index, digests))
            digests.add(read[-1])
        if remember:
            self._kept = _bounded(((read, digests), *(other for other in kept if other is not earlier))[:KEPT])
        turns = [message.turn for message in read if message.turn is not None]
        return RequestHistory(tuple(message.value for message in read), turns, digests.history())


def _bounded(requests: tuple[_ReadRequest, ...]) -> _Kept:
    """As many of the requests as `MOST_BYTES` hold, the newest first."""
    while True:
        sizes = {id(message): message.size for messages, _ in requests for message in messages}
        size = sum(sizes.values())
        if size <= MOST_BYTES:
            return _Kept(requests, size)
        requests = requests[:-1]


def _read(message: dict[str, Any], index: int, before: _Digests) -> _ReadMessage:
    turn = None
    if message["role"] == "assistant":
        turn = RequestTurn(index, meaning(message), before.history())
        content, _, calls = turn.meaning
        text = "".join(f"{len(part)}:{part}" for part in (content, *chain.from_iterable(calls)))
    else:
        text = message.get("content") or ""
    sender = f"{message['role']} {message.get('name')} ".encode("utf-8", "surrogatepass")
    digest = sha256(text.encode("utf-8", "surrogatepass")).digest()  # processors have instructions for it
    calls_text = _calls_text(message)
    size = _memory((message, calls_text, turn.meaning if turn else None))
    return _ReadMessage(message, calls_text, turn, sender, digest, size)


def _memory(value: Any) -> int:
    """Bytes of a value of JSON and of all that it holds."""
    size, left = 0, list[Any]([value])
    while left:
        value = left.pop()
        size += getsizeof(value)
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list | tuple):
            left += value
    return size


def _continues(messages: Sequence[dict[str, Any]], request: list[_ReadMessage]) -> bool:
    """Whether these messages begin with all of the request's. Its last one is compared first: there branches differ."""
    last = len(request) - 1
    return len(messages) > last and _same(request[last], messages[last]) and len(_common(request, messages)) > last


def _common(request: list[_ReadMessage], messages: Sequence[dict[str, Any]]) -> list[_ReadMessage]:
    """The leading messages that both have."""
    count = 0
    for one, other in zip(request, messages, strict=False):
        if not _same(one, other):
            break
        count += 1
    return request[:count]


def _same(known: _ReadMessage, message: dict[str, Any]) -> bool:
    return known.value == message and known.calls == _calls_text(message)


def _calls_text(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return repr(calls) if calls else ""
