"""The shape of a request: what its completion's label is made from (proxy/pool/completions/labels.py), without keeping
its text.

A request repeats recorded turns (its assistant messages mean the same) or quotes them (their words stand elsewhere in
it): summaries in a new history, histories in a summary's request, a tool call's argument as a sub-agent's task. Quotes
are looked for only where a history is new or rewritten. Cost: the system prompt, one message and the last turn of a
request that goes on; the whole of one that does not. Left out: what a prompt without
messages quotes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nlargest
from itertools import islice
from typing import Any, Protocol
from zlib import crc32

from proxy.call import Call, meaning
from proxy.dialects.base import parsed_arguments
from proxy.pool.completions.records import SERVED_FINISH_REASONS, Shape

TURNS_BACK = 8
"""Assistant turns of a request that are looked up, the last first: an agent may have put in some of its own."""
REPLIES_BACK = 32
"""Recorded replies, the newest first, whose words are looked for."""
LINES = 4
"""The longest lines of a text stand for it: agents cut, indent and escape what they quote."""
SHORT, LONG = 16, 200
"""Characters that a line must have to be its author's own, and how many of it are looked for."""


class Replied(Protocol):
    """What of a recorded completion later shapes need."""

    @property
    def shape(self) -> Shape | None: ...
    @property
    def reply(self) -> dict[str, Any]: ...
    @property
    def finish_reason(self) -> str: ...


@dataclass(frozen=True)
class _Said:
    """A recorded reply."""

    id: int
    shape: Shape
    call_ids: tuple[str, ...]
    words: tuple[str, ...]


class Shapes:
    """The replies of one attempt. Any thread may add and ask."""

    def __init__(self) -> None:
        self._said: dict[int, _Said] = {}
        self._by_meaning: dict[bytes, list[_Said]] = {}

    def add(self, id: int, item: Replied) -> None:
        """Take in a committed completion, once."""
        if item.shape is None or id in self._said:
            return
        said = _Said(id, item.shape, _call_ids(item.reply), tuple(_words(item.reply)))
        self._said[id] = said
        if item.finish_reason in SERVED_FINISH_REASONS:
            self._by_meaning.setdefault(_digest(item.reply), []).append(said)

    def of(self, call: Call, follows: int | None) -> Shape:
        """The shape of a request. `follows`: what a prompt without messages continues."""
        tools, constrained = _name("\n".join(_tool_names(call.tools))), call.constraint is not None
        if call.prompt is not None:
            before = self._said.get(follows or 0)
            return Shape(turns=before.shape.turns + 1 if before else 0, continues=follows, constrained=constrained)
        start = next((i for i, message in enumerate(call.messages) if message["role"] != "system"), len(call.messages))
        system = _name("\n".join(message["content"] or "" for message in call.messages[:start]))
        opening = _name(call.messages[start]["content"] or "") if start < len(call.messages) else 0
        turns = [message for message in call.messages if message["role"] == "assistant"]
        before = self._repeated(turns, tools, system)
        goes_on = before is not None and before.shape.opening == opening and before.shape.turns < len(turns)
        return Shape(
            tools=tools,
            system=system,
            opening=opening,
            turns=len(turns),
            continues=before.id if before else None,
            quotes=None if goes_on else self._quoted(call.messages),
            constrained=constrained,
        )

    def _repeated(self, turns: Sequence[dict[str, Any]], tools: int, system: int) -> _Said | None:
        """The reply that the last recorded one of these turns repeats, of several the likeliest."""
        for turn in islice(reversed(turns), TURNS_BACK):
            found = tuple(self._by_meaning.get(_digest(turn), ()))  # a copy: others may be added meanwhile
            if found:
                ids = _call_ids(turn)
                alike = [
                    (said.call_ids == ids, said.shape.tools == tools, said.shape.system == system) for said in found
                ]
                return max(zip(alike, found, strict=True), key=lambda pair: (pair[0], pair[1].id))[1]
        return None

    def _quoted(self, messages: Sequence[dict[str, Any]]) -> int | None:
        """The newest completion whose words stand in the user's messages."""
        text = "\n".join(message["content"] or "" for message in messages if message["role"] == "user")
        newest = islice(reversed(list(self._said.values())), REPLIES_BACK)
        return next((said.id for said in newest if any(words in text for words in said.words)), None)


def _words(reply: dict[str, Any]) -> Iterator[str]:
    """What of a reply is searched for in later requests: long lines of its text and of its tool calls' arguments."""
    yield from _lines(reply.get("content") or "")
    for call in reply.get("tool_calls", ()):
        arguments = parsed_arguments(call["function"]["arguments"])
        values = arguments.values() if isinstance(arguments, dict) else [arguments]
        for value in values:
            yield from _lines(value if isinstance(value, str) else "")


def _lines(text: str) -> list[str]:
    lines = (line.strip() for line in text.splitlines())
    return [line[:LONG] for line in nlargest(LINES, lines, key=len) if len(line) >= SHORT]


def _digest(turn: dict[str, Any]) -> bytes:
    """Of what a turn says. Without its reasoning, which many agents do not repeat."""
    said = meaning({"content": turn.get("content"), "tool_calls": turn.get("tool_calls")})
    return blake2b(repr(said).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _call_ids(turn: dict[str, Any]) -> tuple[str, ...]:
    return tuple(call.get("id", "") for call in turn.get("tool_calls") or ())


def _name(text: str) -> int:
    """A number that names a text; 0 is the empty one's."""
    return crc32(text.encode("utf-8", "surrogatepass"))


def _tool_names(tools: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(str(tool["function"]["name"]) for tool in tools)
