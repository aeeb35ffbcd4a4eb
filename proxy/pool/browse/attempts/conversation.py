"""A conversation of an attempt: the turns that lead to one call, with results, reasoning, text and tool calls.

Requests are not kept, so the results of tools are the ends that `observed` has, with their sizes; the raw tokens of a
prompt have the rest. Long texts are cut, and one whole reply is read in pieces.
"""

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select

from proxy.pool.browse.attempts.attempt import label_of
from proxy.pool.browse.snapshot import snapshot
from proxy.pool.completions import observed
from proxy.pool.database import Pool
from proxy.pool.errors import NotInPool
from proxy.pool.schema import attempts, completions, groups, rollouts, tasks
from proxy.pool.untrained import Untrained

MOST_TURNS = 40
"""Turns of a page."""
MOST_TEXT = 20_000
"""Characters of one text of a turn."""
MOST_CALLS = 64
"""Tool calls of one reply that are shown."""
PIECE = 200_000
"""Characters of a whole reply that are read at once."""
MOST_STEPS = 20_000
"""Calls of one conversation."""


@dataclass(frozen=True)
class CutText:
    """A text, cut to MOST_TEXT characters; `size` is that of the whole."""

    text: str
    size: int


@dataclass(frozen=True)
class ShownResult:
    """What a tool answered, as far as it is kept."""

    call: str
    tool: str
    head: str
    tail: str
    size: int
    error: bool
    spoken: bool
    """It is a message of a user."""


@dataclass(frozen=True)
class ShownCall:
    """A tool call of a reply."""

    id: str
    tool: str
    arguments: CutText
    fault: str
    """How it misses its tool's schema; "": it does not, or it is not known."""


@dataclass(frozen=True)
class ShownTurn:
    """One call of a conversation: what its request showed that was new, and the reply."""

    completion: int
    ordinal: int
    label: str | None
    finish_reason: str
    started_at: float
    finished_at: float
    results: list[ShownResult] | None
    """None: what the request showed is not known."""
    reasoning: CutText
    content: CutText
    calls: list[ShownCall]
    calls_in_all: int
    untrainable: str | None


@dataclass(frozen=True)
class ConversationPage:
    """The last turns of a conversation, oldest first."""

    turns: list[ShownTurn]
    before: int | None
    """The turn before these, to be asked for; None: they begin the conversation."""
    instruction: str | None
    """The task's, where the turns begin a conversation of a rollout's main work. The others begin with other words."""


def conversation(pool: Pool, completion_id: int) -> ConversationPage:
    """Return the turns that lead to a completion and it. NotInPool when the pool does not have it."""
    with snapshot(pool) as connection:
        line = connection.execute(_line(completion_id)).all()
        if not line:
            raise NotInPool(f"the pool has no completion {completion_id}; it may have left for an archive")
        follows = {row.id: row.follows for row in line}
        ids: list[int] = []
        at: int | None = completion_id
        while at is not None and at in follows and len(ids) <= MOST_TURNS:
            ids.append(at)
            at = follows[at]
        shown = ids[:MOST_TURNS]
        rows = {row.id: row for row in connection.execute(_turns(shown))}
        before = ids[MOST_TURNS] if len(ids) > MOST_TURNS else None
        instruction = _instruction(connection, rows[shown[-1]]) if before is None else None
    return ConversationPage([_turn(rows[id]) for id in reversed(shown)], before, instruction)


@dataclass(frozen=True)
class ReplyPiece:
    """Characters [offset, offset + len(text)) of a reply as JSON text."""

    text: str
    offset: int
    total: int


def reply_piece(pool: Pool, completion_id: int, offset: int = 0) -> ReplyPiece:
    """Return a piece of a reply as its JSON text. NotInPool when the pool does not have the completion."""
    query = select(completions.c.reply).where(completions.c.id == completion_id)
    with snapshot(pool) as connection:
        row = connection.execute(query).one_or_none()
    if row is None:
        raise NotInPool(f"the pool has no completion {completion_id}; it may have left for an archive")
    text = msgspec.json.format(msgspec.json.encode(row.reply)).decode()
    start = max(0, min(offset, len(text)))
    return ReplyPiece(text[start : start + PIECE], start, len(text))


def _line(completion_id: int) -> Any:
    """Select a completion and those that it follows."""
    chain = select(completions.c.id, completions.c.follows).where(completions.c.id == completion_id).cte(recursive=True)
    before = select(completions.c.id, completions.c.follows).join(chain, completions.c.id == chain.c.follows)
    chain = chain.union(before)
    return select(chain.c.id, chain.c.follows).limit(MOST_STEPS)


def _turns(ids: list[int]) -> Any:
    columns = (
        completions.c.id, completions.c.attempt_id, completions.c.ordinal, completions.c.label,
        completions.c.finish_reason, completions.c.started_at, completions.c.finished_at, completions.c.reply,
        completions.c.observed, completions.c.untrainable, completions.c.untrainable_detail,
    )  # fmt: skip
    return select(*columns).where(completions.c.id.in_(ids))


def _turn(row: Row[Any]) -> ShownTurn:
    seen = None if row.observed is None else observed.unpack(row.observed)
    faults = seen.faults if seen else ()
    calls = list(row.reply.get("tool_calls") or ())
    why = Untrained.from_columns(row.untrainable, row.untrainable_detail)
    return ShownTurn(
        completion=row.id,
        ordinal=row.ordinal,
        label=row.label,
        finish_reason=row.finish_reason,
        started_at=row.started_at,
        finished_at=row.finished_at,
        results=None if seen is None else [_result(each) for each in seen.results],
        reasoning=_cut(row.reply.get("reasoning_content")),
        content=_cut(row.reply.get("content")),
        calls=[_call(call, faults[at] if at < len(faults) else "") for at, call in enumerate(calls[:MOST_CALLS])],
        calls_in_all=len(calls),
        untrainable=None if why is None else str(why),
    )


def _call(call: dict[str, Any], fault: str) -> ShownCall:
    function = call["function"]
    return ShownCall(str(call.get("id", "")), str(function["name"]), _cut(function.get("arguments")), fault)


def _result(each: observed.ToolResult) -> ShownResult:
    return ShownResult(each.call, each.name, each.head, each.tail, each.size, each.error, each.spoken)


def _cut(value: Any) -> CutText:
    text = value if isinstance(value, str) else "" if value is None else str(value)
    return CutText(text[:MOST_TEXT], len(text))


def _instruction(connection: Connection, root: Row[Any]) -> str | None:
    """Return the task's instruction; None where the root belongs to no rollout, or not to the main work."""
    if label_of(connection, root) not in ("main", None):
        return None
    query = (
        select(tasks.c.spec)
        .join_from(attempts, rollouts, rollouts.c.id == attempts.c.rollout_id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .where(attempts.c.id == root.attempt_id)
    )
    spec = connection.scalar(query)
    return None if spec is None else str(spec.get("instruction", ""))[:MOST_TEXT]
