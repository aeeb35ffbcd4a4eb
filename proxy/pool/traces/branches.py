"""The branches of an attempt's prompt tree, as messages. Every recorded answer is the own turn of one branch.

A call whose prompt begins with the whole path of an earlier one continues that one's branch. If another call has
continued it before, or if the prompt begins otherwise (a sub-agent, a side call, a rewritten history), it begins a
branch of its own, with the turns before it as copies.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from proxy.pool.read.records import CompletionRecord, RolloutRecord
from proxy.pool.traces.arguments import decoded_arguments


@dataclass(frozen=True)
class PromptReading:
    """A prompt, or the end of one, as messages in the form of chat completions."""

    messages: list[dict[str, Any]]
    """role, content, and of assistants reasoning_content and tool_calls without ids."""
    tools: list[dict[str, Any]] | None = None
    """The tools that it offers; None: not known."""
    raw: bool = False
    """The template's messages could not be told apart: the one message is the text with all its markers."""


class PromptReader(Protocol):
    """Reads prompts that a model's chat template has rendered (proxy/prompt/conversations)."""

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a turn."""

    def whole(self, tokens: Sequence[int], dated_at: float | None) -> PromptReading:
        """Read a whole prompt. `dated_at`: the unix time that the template read."""

    def added(self, tokens: Sequence[int], dated_at: float | None) -> PromptReading:
        """Read what a prompt adds to a recorded answer, from the end of that turn on."""


@dataclass(frozen=True, kw_only=True)
class BranchTurn:
    """One message of a branch."""

    message: dict[str, Any]
    """The message in the form of chat completions."""
    completion: CompletionRecord | None = None
    """The call that sampled it; None: it is a message of a prompt."""
    copied: bool = False
    """It is context: an own turn of another branch, or a part of the history with which the branch begins."""
    raw: bool = False
    """It is text of a prompt that could not be read as messages."""


@dataclass(kw_only=True)
class PromptBranch:
    """A conversation as the model saw it, up to its last answer."""

    rollout: RolloutRecord
    number: int
    """Its place among the branches of its attempt, from 0."""
    tools: list[dict[str, Any]] | None
    """None: not known."""
    forked_from: int | None = None
    """The branch that has its copied turns as its own; None: it begins by itself."""
    turns: list[BranchTurn] = field(default_factory=list)

    @property
    def own(self) -> list[CompletionRecord]:
        """The calls of this branch, in order."""
        return [turn.completion for turn in self.turns if turn.completion is not None and not turn.copied]

    @property
    def label(self) -> str | None:
        """main | subagent | side | compaction; None: the calls are older than labels."""
        return self.own[0].label

    @property
    def name(self) -> str:
        """A name that no other branch of the pool has."""
        return f"attempt-{self.rollout.attempt:06}-{self.number}"


def branches(rollout: RolloutRecord, reader: PromptReader) -> list[PromptBranch]:
    """Return the branches of an attempt, in the order in which they began."""
    found: list[PromptBranch] = []
    place: dict[int, tuple[PromptBranch, int]] = {}  # completion -> its branch, and the number of turns up to it
    seen: dict[int, CompletionRecord] = {}
    for item in rollout.completions:
        before = _continued(item, seen, reader.ends)
        if before is None:
            reading = reader.whole(item.tokens[: item.prompt_length], rollout.dated_at)
            branch = PromptBranch(rollout=rollout, number=len(found), tools=reading.tools)
        else:
            start = _end_of_turn(before, reader.ends)
            reading = reader.added(item.tokens[start : item.prompt_length], rollout.dated_at)
            branch, turns = place[before.id]
            if turns < len(branch.turns):
                branch = _forked(branch, turns, len(found))
        if branch.number == len(found):
            found.append(branch)
        branch.turns += _context(reading, item, branch.turns, seen)
        branch.turns.append(BranchTurn(message=item.message, completion=item))
        place[item.id], seen[item.id] = (branch, len(branch.turns)), item
    return found


def _continued(
    item: CompletionRecord, seen: dict[int, CompletionRecord], ends: frozenset[int]
) -> CompletionRecord | None:
    """Return the newest completion whose whole path the prompt begins with."""
    shared, before = item.prefix_length, seen.get(item.prefix_of or 0)
    while before is not None and not _goes_on_after(before, item, shared, ends):
        shared, before = min(shared, before.prefix_length), seen.get(before.prefix_of or 0)
    return before


def _goes_on_after(before: CompletionRecord, item: CompletionRecord, shared: int, ends: frozenset[int]) -> bool:
    """Whether a prompt goes on after an answer, of whose path it has `shared` tokens."""
    end = _end_of_turn(before, ends)
    # The same prompt, asked again, has all tokens of an empty answer, and is no later turn.
    return shared >= end and (end > before.prompt_length or item.prompt_length > end)


def _end_of_turn(item: CompletionRecord, ends: frozenset[int]) -> int:
    """Return how many tokens of its path lie before the one that ends the turn."""
    ended = len(item.tokens) > item.prompt_length and item.tokens[-1] in ends
    return len(item.tokens) - ended


def _forked(branch: PromptBranch, turns: int, number: int) -> PromptBranch:
    copies = [replace(turn, copied=True) for turn in branch.turns[:turns]]
    return PromptBranch(
        rollout=branch.rollout, number=number, tools=branch.tools, forked_from=branch.number, turns=copies
    )


def _context(
    reading: PromptReading, item: CompletionRecord, turns: Sequence[BranchTurn], earlier: Mapping[int, CompletionRecord]
) -> list[BranchTurn]:
    """Return what a prompt adds to the turns of a branch. Those up to the last answer among them are copies."""
    messages: list[dict[str, Any]] = []
    calls = list(turns[-1].message.get("tool_calls") or ()) if turns else []
    recorded = _recorded_ids(reading.messages, item, turns, earlier)
    last = -1
    for at, message in enumerate(reading.messages):
        if message["role"] == "assistant":
            messages += _named(reading.messages[last + 1 : at], _ids(calls))
            named = _with_ids(message, len(turns) + at, recorded.get(at, ())) if message.get("tool_calls") else message
            messages.append(named)
            calls, last = list(named.get("tool_calls") or ()), at
    shown = [each.call for each in item.observed.results if not each.spoken] if item.observed else []
    newest = reading.messages[last + 1 :]
    results = sum(message["role"] == "tool" for message in newest)
    messages += _named(newest, shown if len(shown) == results and all(shown) else _ids(calls))
    return [BranchTurn(message=message, copied=at <= last, raw=reading.raw) for at, message in enumerate(messages)]


def _ids(calls: Sequence[dict[str, Any]]) -> list[str]:
    return [str(call.get("id") or "") for call in calls]


def _named(messages: Sequence[dict[str, Any]], ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages whose results have these ids in order; without ids, where there are not as many results."""
    results = [at for at, message in enumerate(messages) if message["role"] == "tool"]
    if len(results) != len(ids) or not all(ids):
        return list(messages)
    by_place = dict(zip(results, ids, strict=True))
    return [message | ({"tool_call_id": by_place[at]} if at in by_place else {}) for at, message in enumerate(messages)]


def _recorded_ids(
    messages: Sequence[dict[str, Any]],
    item: CompletionRecord,
    turns: Sequence[BranchTurn],
    earlier: Mapping[int, CompletionRecord],
) -> dict[int, list[str]]:
    """Return the ids of the calls in a history by the place of the answer: those of the record that calls the same.

    A record gives its ids once to a branch. The newest come first, as histories lose their beginning rather than their
    end, and before all others those of the conversation that `item` follows.
    """
    asked = [at for at, message in enumerate(messages) if message.get("tool_calls")]
    if not asked:
        return {}
    chain: dict[int, CompletionRecord] = {}
    before = earlier.get(item.follows or 0)
    while before is not None and before.id not in chain:
        chain[before.id] = before
        before = earlier.get(before.follows or 0)
    used = {turn.completion.id for turn in turns if turn.completion is not None}
    unused = {id: _says(each.message) for id, each in (chain | dict(reversed(list(earlier.items())))).items()}
    found: dict[int, list[str]] = {}
    for at in reversed(asked):
        said = _says(messages[at])
        same = next((id for id, other in unused.items() if id not in used and other == said), None)
        if same is not None:
            used.add(same)
            found[at] = _ids(earlier[same].message["tool_calls"])
    return found


def _says(message: dict[str, Any]) -> Any:
    """Return what two forms of one answer share: its text and its calls.

    Values of arguments are compared as text, since a template may show a number as it shows text.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = decoded_arguments(call["function"].get("arguments") or "{}")
        if isinstance(arguments, dict):
            arguments = {key: each if isinstance(each, str) else json.dumps(each) for key, each in arguments.items()}
        calls.append((call["function"]["name"], arguments))
    return (message.get("content") or "").strip(), calls


def _with_ids(message: dict[str, Any], at: int, recorded: Sequence[str]) -> dict[str, Any]:
    """Return an answer of a history with the ids of its record; with made ones where it has none.

    A prompt shows no ids, and the formats that are written need some.
    """
    calls = message["tool_calls"]
    ids = [own or f"context-{at}-{number}" for number, own in enumerate(recorded or [""] * len(calls))]
    return message | {"tool_calls": [{"id": id} | call for call, id in zip(calls, ids, strict=True)]}
