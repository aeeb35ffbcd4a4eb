"""Which reply a recorded request continues, told from the recorded messages alone; no code of the proxy is used.

A request continues a call when it begins with that call's messages, then holds a turn that says what the call's reply
said; the last such turn counts. These differences do not count: arguments written otherwise with an equal JSON value, a
missing text instead of an empty one, other white space around a text. A turn that the agent renamed or repaired counts
if it has kept the ids of the calls; the prompt need not begin with that call's tokens then. A dropped turn does not.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tests.captures.recorded import Exchange

Key = tuple[Any, ...]
SETTINGS = ("tools", "tool_choice", "reasoning", "reasoning_effort", "thinking", "chat_template_kwargs")
"""Fields that change the prompt besides the messages."""


@dataclass(frozen=True)
class Turn:
    """A message of any dialect. Messages with equal `content` are the same; ids of calls only break ties."""

    role: str
    content: Key
    ids: tuple[str, ...] = ()
    reasons: bool = False


@dataclass(frozen=True)
class Continuation:
    """What a request continues: the calls that it may follow, none where it begins something new."""

    exchange: Exchange
    follows: tuple[Exchange, ...]
    exact: bool
    """Whether the prompt must begin with all tokens of that call: the template drops nothing and all else is equal."""


def continuations(exchanges: Sequence[Exchange]) -> list[Continuation]:
    """One for each exchange of a session, in their order."""
    replies: dict[Key, list[_Given]] = {}
    asked: dict[Key, list[_Given]] = {}
    results = []
    for exchange in sorted(exchanges, key=lambda each: each.seq):
        read = {"chat": _chat, "responses": _responses, "anthropic": _messages}[exchange.api]
        turns = read(exchange.body)
        end, exact = _repeated(exchange, turns, replies)
        changed = _changed(exchange, turns, end, asked)
        results.append(changed or exact)
        reply = _reply(exchange)
        if reply:
            replies.setdefault(_contents([*turns, *reply]), []).append((exchange, _ids(reply)))
            asked.setdefault(_contents(turns), []).append((exchange, _ids(reply)))
    return results


_Given = tuple[Exchange, tuple[str, ...]]
"""A call, and the ids of the tool calls in its reply."""


def _repeated(exchange: Exchange, turns: list[Turn], replies: dict[Key, list[_Given]]) -> tuple[int, Continuation]:
    """The calls whose reply stands in the request as it was, and how many of its turns that is."""
    for end in range(len(turns), 0, -1):
        candidates = replies.get(_contents(turns[:end]), [])
        ids = _ids(turns[:end])
        same_ids = [call for call, given in candidates if ids[len(ids) - len(given) :] == given]
        follows = same_ids or [call for call, _ in candidates]
        if follows:
            equal = all(exchange.body.get(name) == follows[-1].body.get(name) for name in SETTINGS)
            return end, Continuation(exchange, tuple(follows), equal and not _dropped(turns, end - 1))
    return 0, Continuation(exchange, (), False)


def _changed(exchange: Exchange, turns: list[Turn], since: int, asked: dict[Key, list[_Given]]) -> Continuation | None:
    """The call whose reply stands behind the first `since` turns, changed, but with the ids of its calls."""
    for start in reversed(range(since, len(turns))):
        behind = takewhile(lambda turn: turn.role == "assistant", turns[start:])
        ids = set(_ids(list(behind)))
        same = [call for call, given in asked.get(_contents(turns[:start]), []) if given and ids.issuperset(given)]
        if same:
            return Continuation(exchange, tuple(same), False)
    return None


def _contents(turns: Sequence[Turn]) -> Key:
    return tuple(turn.content for turn in turns)


def _ids(turns: Sequence[Turn]) -> tuple[str, ...]:
    return tuple(id for turn in turns for id in turn.ids)


def _dropped(turns: list[Turn], at: int) -> bool:
    """Whether a template that keeps reasoning only behind the last user message drops reasoning that it had kept."""
    users = [i for i, turn in enumerate(turns) if turn.role == "user"]
    before, now = max((i for i in users if i < at), default=-1), max(users, default=-1)
    return any(turn.reasons for turn in turns[before + 1 : min(at + 1, now)])


def _reply(exchange: Exchange) -> list[Turn]:
    """The turn that the client got. Nothing if it may be incomplete, or if a call's arguments are not an object."""
    reply = exchange.reply
    if reply is None or exchange.kind == "fault" or exchange.cut or exchange.gone:
        return []
    calls = [(call["id"], _name(call), _value(call["arguments"])) for call in reply["calls"]]
    if any(isinstance(value, str) for _, _, value in calls):
        return []
    if exchange.api != "responses":
        return [_turn(reply["content"], reply["reasoning"], calls)]
    return [_turn(text, "", []) for text in [reply["content"]] if text] + [_turn("", "", [call]) for call in calls]


def _turn(text: str | None, reasoning: str | None, calls: list[tuple[str, str, Any]]) -> Turn:
    functions = tuple((name, json.dumps(value, sort_keys=True)) for _, name, value in calls)
    meaning = ("assistant", (text or "").strip(), (reasoning or "").strip(), functions)
    return Turn("assistant", meaning, tuple(id for id, _, _ in calls), bool((reasoning or "").strip()))


def _name(call: dict[str, Any]) -> str:
    return f"{call.get('namespace') or ''}/{call['name']}"


def _value(arguments: Any) -> Any:
    """The object in the arguments, or their text if they hold none."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(
            arguments or "{}", parse_float=lambda text: int(float(text)) if float(text) % 1 == 0 else float(text)
        )
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


# ---- the messages of each dialect


def _chat(body: dict[str, Any]) -> list[Turn]:
    turns = []
    for message in body["messages"]:
        text = _text(message.get("content"))
        if message["role"] == "assistant":
            calls = [
                (c["id"], _name(c["function"]), _value(c["function"]["arguments"]))
                for c in message.get("tool_calls") or ()
            ]
            turns.append(_turn(text, message.get("reasoning_content"), calls))
        else:
            turns.append(Turn(message["role"], (message["role"], text, message.get("tool_call_id"))))
    return turns


def _responses(body: dict[str, Any]) -> list[Turn]:
    """Each item is a turn, also where several are one reply."""
    turns = [Turn("system", ("system", body["instructions"]))] if body.get("instructions") else []
    for item in body["input"]:
        if item.get("type") == "function_call":
            turns.append(_turn("", "", [(item["call_id"], _name(item), _value(item["arguments"]))]))
        elif item.get("type") == "function_call_output":
            turns.append(Turn("tool", ("tool", _text(item["output"]), item["call_id"])))
        elif item["role"] == "assistant":
            turns.append(_turn(_text(item["content"]), "", []))
        else:
            turns.append(Turn(item["role"], (item["role"], _text(item.get("content")))))
    return turns


def _messages(body: dict[str, Any]) -> list[Turn]:
    turns = [Turn("system", ("system", _text(body.get("system"))))]
    for message in body["messages"]:
        blocks = (
            message["content"]
            if isinstance(message["content"], list)
            else [{"type": "text", "text": message["content"]}]
        )
        if message["role"] == "assistant":
            calls = [(b["id"], _name(b), b["input"]) for b in blocks if b["type"] == "tool_use"]
            turns.append(_turn(_text(blocks), "".join(b.get("thinking", "") for b in blocks), calls))
            continue
        results = tuple((b["tool_use_id"], _text(b["content"])) for b in blocks if b["type"] == "tool_result")
        text = _text([b for b in blocks if b["type"] == "text"])
        role = "user" if text or not results else "tool"
        turns.append(Turn(role, (role, text, results)))
    return turns


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\0".join(part.get("text", "") for part in content if "text" in part)
    return content or ""
