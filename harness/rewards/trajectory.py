"""A rollout's trajectory, made from the pool: what the agent wrote and called, and what is kept of the results.

Requests are not in the pool, so a trajectory has the ends of results (proxy/pool/completions/observed.py), and no
system prompt. Side calls are left out, and answers that broke off. A reader shows it to judges and reward functions.
Calls and results are in the agent's words where its model was shown others; the model's own texts stay as they are.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from proxy.pool.behaviour.actions import Action, Readable, actions, work_of
from proxy.pool.behaviour.results import failure
from proxy.pool.completions.labels import COMPACTION, SUBAGENT
from proxy.pool.completions.observed import ToolResult

LONGEST = 60_000
"""Characters of a trajectory that a judge is shown: about 15000 tokens."""
LIMITS = ((4000, 4000, 4000), (1000, 4000, 4000), (300, 4000, 4000), (100, 1000, 4000), (100, 300, 1000), (0, 100, 300),
          (0, 0, 100))  # fmt: skip
"""Characters of one result, of a reasoning or a reply, and of a call's arguments in it: the first that make it fit."""
NOTE = 40
"""About the characters of a note that says how many are left out."""
ANOTHER = "\n[another request shows this as the result of the same call:]\n"
_NAME = re.compile(r"[\w.:/-]{1,100}")
"""Names of tools that stand in a line of ours."""


class TimedCompletion(Readable, Protocol):
    """A recorded completion, with its times and sizes."""

    @property
    def ordinal(self) -> int: ...
    @property
    def started_at(self) -> float: ...
    @property
    def finished_at(self) -> float: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def sampled_count(self) -> int: ...


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, and what is kept of its result."""

    name: str
    arguments: str
    """The arguments as the model wrote them, under the agent's names."""
    fault: str = ""
    """How the call misses its tool's schema, or that there is no such tool. Empty: it fits."""
    result: str | None = None
    """The result, the ends of one that is longer than what is kept. None: it is not known. Where requests show
    different ones, all of them."""
    result_size: int = 0
    """Characters of the whole result, of several the longest."""
    failed: str = ""
    """How it failed, in a word. Empty: it did not, or the result is not known."""


class TrajectoryTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the model that the agent acted on."""

    completion: int
    """Its id in the pool."""
    turn: int
    """Its ordinal among the attempt's completions: the N of a part `turn:N`."""
    label: str
    """main | subagent | compaction. Rows written before labels existed count as main."""
    branch: int
    """Its conversation: 0 for the first one. A compaction and what goes on from it stay in theirs."""
    reasoning: str
    text: str
    calls: list[ToolUse]
    finish_reason: str
    started_at: float
    """Unix seconds."""
    seconds: float
    prompt_tokens: int
    sampled_tokens: int


def trajectory(chain: Sequence[TimedCompletion]) -> list[TrajectoryTurn]:
    """Return the turns of an attempt from its completions, both in the order of their commits."""
    work = work_of(chain)
    done, branches = actions(work), _branches(work)
    return [
        TrajectoryTurn(
            completion=item.id,
            turn=item.ordinal,
            label=item.label or "main",
            branch=branches[item.id],
            reasoning=str(item.reply.get("reasoning_content") or ""),
            text=str(item.reply.get("content") or ""),
            calls=[_tool_use(action) for action in done[item.id]],
            finish_reason=item.finish_reason,
            started_at=item.started_at,
            seconds=item.finished_at - item.started_at,
            prompt_tokens=item.prompt_length,
            sampled_tokens=item.sampled_count,
        )
        for item in work
    ]


def rendered(turns: Sequence[TrajectoryTurn], longest: int = LONGEST) -> str:
    """Return a trajectory as text of about `longest` characters, which says what is left out of a longer one.

    Results are shortened first, then what the agent says, then the arguments of calls, to their ends: each call is
    shown. Only where there are too many calls for that, the middle is left out.
    """
    several, whole = len({turn.branch for turn in turns}) > 1, 0
    text = note = ""
    for limits in LIMITS:
        text = "\n\n".join(_turn_text(turn, several, limits) for turn in turns)
        whole = whole or len(text)
        if len(text) < whole:
            note = f"[Shortened: {whole - len(text)} characters are left out, in the places that say so.]\n\n"
        if len(note) + len(text) <= longest:
            break
    return _cut_at_lines(note + text, longest)


def quoted(name: str, text: str) -> str:
    """Return a text as data between tags. No text can close its own: the tag's name depends on the text."""
    tag = f"{name}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:12]}"
    return f"<{tag}>\n{text}\n</{tag}>"


def cut(text: str, longest: int) -> str:
    """Return a text without its middle where it is longer, with a note of how much is missing."""
    if len(text) <= longest:
        return text
    head = longest // 2
    return f"{text[:head]}\n[{len(text) - longest} characters are left out here]\n{text[len(text) - longest + head :]}"


def indented(text: str) -> str:
    """Return a text with every line indented, so that none can pass for one of ours, which begin at the margin."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _cut_at_lines(text: str, longest: int) -> str:
    """The same, and what follows the note begins with a whole line: the end of an indented one would not be."""
    if len(text) <= longest:
        return text
    head = text[: longest // 2]
    tail = text[len(text) - longest + len(head) :].partition("\n")[2]
    return f"{head}\n[{len(text) - len(head) - len(tail)} characters are left out here]\n{tail}"


def _branches(work: Sequence[Readable]) -> dict[int, int]:
    """The conversation of each completion: that of the one it follows, unless another has gone on there already."""
    branches: dict[int, int] = {}
    continued: set[int] = set()
    for item in work:
        before = item.follows or (item.shape.continues if item.shape else None)
        if before in branches and before not in continued:
            branches[item.id] = branches[before]
            continued |= {before} if item.label != COMPACTION else set()
        else:
            rewritten = branches and before not in branches and item.label != SUBAGENT
            branches[item.id] = 0 if rewritten else len(set(branches.values()))
    return branches


def _tool_use(action: Action) -> ToolUse:
    # A request of somebody else's, such as a command's, may show a result that it made up: a judge sees all of them.
    kept = ANOTHER.join(map(_kept, action.results)) if action.results else None
    return ToolUse(
        name=action.tool,
        arguments=action.written,
        fault=action.fault,
        result=kept,
        result_size=max((result.size for result in action.results), default=0),
        failed=failure(action) or "",
    )


def _kept(result: ToolResult) -> str:
    missing = result.size - len(result.head) - len(result.tail)
    between = f"\n[{missing} characters are not kept]\n" if missing > 0 else ""
    return f"{result.head}{between}{result.tail}"


def _turn_text(turn: TrajectoryTurn, several: bool, limits: tuple[int, int, int]) -> str:
    of_result, of_speech, of_arguments = limits
    where = f" ({turn.label}, conversation {turn.branch})" if several or turn.label != "main" else ""
    lines = [f"== turn {turn.turn}{where}, ended by {turn.finish_reason}"]
    lines += [_framed(name, text, of_speech) for name, text in _said(turn) if text.strip()]
    for call in turn.calls:
        if _NAME.fullmatch(call.name):
            lines.append(_framed(f"calls {call.name}", call.arguments, of_arguments))
        else:  # the model may have made it up
            lines.append(_framed("calls a tool of this name", call.name, of_arguments))
            lines.append(_framed("with", call.arguments, of_arguments))
        lines += [_framed("is no valid call", call.fault, of_arguments)] if call.fault else []
        if call.result is None:
            lines.append("[the result is not known]")
        else:
            lines.append(_framed(f"result{f', failed: {call.failed}' if call.failed else ''}", call.result, of_result))
    return "\n".join(lines)


def _framed(frame: str, text: str, longest: int) -> str:
    """A line of ours, and a text of the agent's or of a tool's below it, cut where that saves more than its note."""
    shown = cut(text, longest).strip("\n") if len(text) > longest + NOTE else text
    return f"[{frame}]\n{indented(shown)}" if text else f"[{frame}]"


def _said(turn: TrajectoryTurn) -> list[tuple[str, str]]:
    return [("reasons", turn.reasoning), ("says", turn.text)]


def plain(turns: Sequence[TrajectoryTurn]) -> list[dict[str, Any]]:
    """Return turns as plain data, for a function in another process."""
    data: list[dict[str, Any]] = msgspec.to_builtins(turns)
    return data
