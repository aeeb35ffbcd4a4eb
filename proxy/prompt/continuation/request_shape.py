"""The shape of a request: what its label is made from (proxy/pool/completions/labels.py), without its text.

A request repeats recorded turns (its assistant messages mean the same) or quotes them (their words stand elsewhere in
it): summaries in a new history, histories in a summary's request, a tool call's argument as a sub-agent's task. Quotes
are looked for only where a history is new or rewritten. A request that goes on costs the system prompt, one message and
the last turn; any other costs a pass over all of it. Left out: what a prompt without messages quotes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, Protocol
from zlib import crc32

from proxy.call import Call
from proxy.dialects.base import parsed_arguments
from proxy.pool.completions.records import SERVED_FINISH_REASONS, RequestShape
from proxy.prompt.continuation.meaning import as_javascript, distinctive_lines, meaning, without_reasoning

TURNS_BACK = 8
"""Assistant turns of a request that are looked up, the last first: an agent may have put in some of its own."""
REPLIES_BACK = 32
"""Recorded replies, the newest first, whose words are looked for."""


class RepliedCompletion(Protocol):
    """What later shapes need of a recorded completion."""

    @property
    def shape(self) -> RequestShape | None: ...
    @property
    def reply(self) -> dict[str, Any]: ...
    @property
    def finish_reason(self) -> str: ...


@dataclass(frozen=True)
class _RecordedReply:
    id: int
    shape: RequestShape
    call_ids: tuple[str, ...]
    lines: tuple[str, ...]
    """What is searched for in later requests."""


class RequestShapes:
    """The replies of one attempt. Any thread may add and ask.

    Without a lock: dictionaries and lists only grow, and readers take copies before they iterate.
    """

    def __init__(self) -> None:
        self._replies: dict[int, _RecordedReply] = {}
        self._by_meaning: dict[bytes, list[_RecordedReply]] = {}

    def add(self, id: int, item: RepliedCompletion) -> None:
        """Add a committed completion, once."""
        if item.shape is None or id in self._replies:
            return
        reply = _RecordedReply(id, item.shape, _call_ids(item.reply), tuple(_quotable_lines(item.reply)))
        self._replies[id] = reply
        if item.finish_reason in SERVED_FINISH_REASONS:
            self._by_meaning.setdefault(_digest(item.reply), []).append(reply)

    def of(self, call: Call, follows: int | None) -> RequestShape:
        """The shape of a request. `follows`: the completion that it continues, as far as its prompt tells."""
        offered = () if call.no_calls else call.tools
        tools = _name("\n".join(sorted(str(tool["function"]["name"]) for tool in offered)))
        constrained = call.constraint is not None
        if call.prompt is not None:
            before = self._replies.get(follows or 0)
            return RequestShape(
                turns=before.shape.turns + 1 if before else 0, continues=follows, constrained=constrained
            )
        start = next((i for i, message in enumerate(call.messages) if message["role"] != "system"), len(call.messages))
        system = _name("\n".join(message["content"] or "" for message in call.messages[:start]))
        opening = _name(call.messages[start]["content"] or "") if start < len(call.messages) else 0
        turns = [message for message in call.messages if message["role"] == "assistant"]
        before, followed = self._repeated(turns, tools, system), self._replies.get(follows or 0)
        count = len(turns)
        if followed is not None and (before is None or before.id < followed.id):  # the agent has changed that turn
            before, count = followed, max(count, followed.shape.turns + 1)
        goes_on = before is not None and before.shape.opening == opening and before.shape.turns < count
        return RequestShape(
            tools=tools,
            system=system,
            opening=opening,
            turns=count,
            continues=before.id if before else None,
            quotes=None if goes_on else self._quoted(call.messages),
            constrained=constrained,
        )

    def _repeated(self, turns: Sequence[dict[str, Any]], tools: int, system: int) -> _RecordedReply | None:
        """The reply that the last recorded one of these turns repeats; of several, the likeliest."""
        for turn in islice(reversed(turns), TURNS_BACK):
            replies = tuple(self._by_meaning.get(_digest(turn), ()))  # a copy: others may be added meanwhile
            if replies:
                ids = _call_ids(turn)
                alike = [(r.call_ids == ids, r.shape.tools == tools, r.shape.system == system) for r in replies]
                return max(zip(alike, replies, strict=True), key=lambda pair: (pair[0], pair[1].id))[1]
        return None

    def _quoted(self, messages: Sequence[dict[str, Any]]) -> int | None:
        """The newest completion whose words stand in the user's messages."""
        text = "\n".join(message["content"] or "" for message in messages if message["role"] == "user")
        newest = islice(reversed(list(self._replies.values())), REPLIES_BACK)
        for reply in newest:
            for line in reply.lines:
                if line in text:
                    return reply.id
        return None


def _quotable_lines(reply: dict[str, Any]) -> Iterator[str]:
    """Long lines of a reply's text and of its tool calls' arguments."""
    yield from distinctive_lines(reply.get("content") or "")
    for call in reply.get("tool_calls", ()):
        arguments = parsed_arguments(call["function"]["arguments"])
        values = arguments.values() if isinstance(arguments, dict) else [arguments]
        for value in values:
            yield from distinctive_lines(value if isinstance(value, str) else "")


def _digest(turn: dict[str, Any]) -> bytes:
    """Digest what a turn says, without its reasoning, which many agents do not repeat."""
    text_and_calls = without_reasoning(meaning({"content": turn.get("content"), "tool_calls": turn.get("tool_calls")}))
    return blake2b(repr(as_javascript(text_and_calls)).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _call_ids(turn: dict[str, Any]) -> tuple[str, ...]:
    return tuple(call.get("id", "") for call in turn.get("tool_calls") or ())


def _name(text: str) -> int:
    """A number that names a text; 0 for the empty one."""
    return crc32(text.encode("utf-8", "surrogatepass"))
