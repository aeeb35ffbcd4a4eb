"""An attempt and its calls as a tree: for what, how long, by which weights, and what became of their tokens."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Integer, Row, case, func, null, select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.completions.labels import labels
from proxy.pool.completions.records import RequestShape
from proxy.pool.database import Pool
from proxy.pool.errors import NotInPool
from proxy.pool.processes.owners import attended
from proxy.pool.rollouts.failures import FAILURES
from proxy.pool.schema import attempts, completions, fates, groups, policy_versions, rollouts, runs
from proxy.pool.untrained import Untrained

MOST_CALLS = 500
"""Calls of a page."""
WORDS = 160
"""Characters of a reply in the tree."""
REPLIES_AT_ONCE = 50
"""Replies that are in memory together."""
LARGE_REPLY = 64 << 10
"""Stored bytes of a reply whose words are not read for the tree."""


@dataclass(frozen=True)
class AttemptView:
    """One attempt, or a session outside of runs."""

    id: int
    run: str | None
    group_id: int | None
    rollout_id: int | None
    number: int
    agent: str
    failure: str | None
    meaning: str
    """What the kind of failure means."""
    detail: str | None
    timings: dict[str, float]
    """Seconds by phase, as the harness measured them: setup, agent, total ..."""
    augmentation: list[str]
    exit_code: int | None
    opened_at: float
    closed_at: float | None
    cut_off: bool
    """It is not closed, and no harness works at its run."""
    sampled_tokens: int | None
    max_turns: int | None
    max_tokens: int | None
    spent: str | None
    trouble: str | None
    trouble_at: float | None
    failed_calls: list[list[float]]
    archive: bool
    """Its calls have left the pool for an archive."""
    calls_in_all: int
    """Calls that the pool has."""


@dataclass(frozen=True)
class CallEntry:
    """A model call in the tree."""

    id: int
    ordinal: int
    depth: int
    """Forks above it."""
    follows: int | None
    """The call whose reply its request continues."""
    prefix_of: int | None
    prefix_length: int
    label: str | None
    finish_reason: str
    prompt_tokens: int
    new_tokens: int
    """Tokens of the prompt that are stored with this call."""
    answer_tokens: int
    versions: list[str]
    started_at: float
    finished_at: float
    queued_seconds: float | None
    """How many of these it waited for a place at the proxy and for an engine; None: not known."""
    untrainable: str | None
    misfit: str | None
    trained: int | None
    """Tokens that the last step which took it has trained; None: none took it."""
    left_out: dict[str, int]
    step: int | None
    rolled_back: bool
    words: str
    """The first words of the reply."""
    tools: list[str]
    """The tools that the reply calls."""


@dataclass(frozen=True)
class CallsPage:
    """Calls in the order of the tree, each after the one that it follows."""

    calls: list[CallEntry]
    next: int | None
    """The ordinal of the first call of the next page; None: this is the last one."""


def attempt_view(pool: Pool, attempt_id: int) -> AttemptView:
    """Return an attempt. NotInPool when there is none with this id."""
    query = (
        select(attempts, runs.c.name.label("run"), rollouts.c.group_id, groups.c.dropped_at)
        .outerjoin(runs, runs.c.id == attempts.c.run_id)
        .outerjoin(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .outerjoin(groups, groups.c.id == rollouts.c.group_id)
        .where(attempts.c.id == attempt_id)
    )
    last = select(func.max(completions.c.ordinal)).where(completions.c.attempt_id == attempt_id)
    with snapshot(pool) as connection:
        row = connection.execute(query).one_or_none()
        newest = connection.scalar(last)
        if row is None:
            raise NotInPool(f"the pool has no attempt {attempt_id}; the pages of its rollouts list those that it has")
        open_in_run = row.run_id is not None and row.closed_at is None
        cut_off = open_in_run and not attended(connection, pool, row.run_id)
    return AttemptView(
        **{name: row._mapping[name] for name in _SAME},
        run=row.run,
        group_id=row.group_id,
        cut_off=cut_off,
        meaning=FAILURES[row.failure].text if row.failure in FAILURES else "",
        timings=row.timings or {},
        augmentation=row.augmentation or [],
        failed_calls=row.failed_calls or [],
        archive=row.dropped_at is not None,
        calls_in_all=0 if newest is None else newest + 1,
    )


_SAME = (
    "id", "rollout_id", "number", "agent", "failure", "detail", "exit_code", "opened_at", "closed_at",
    "sampled_tokens", "max_turns", "max_tokens", "spent", "trouble", "trouble_at",
)  # fmt: skip


def calls_page(pool: Pool, attempt_id: int, first: int = 0) -> CallsPage:
    """Return the calls of an attempt from the ordinal `first` on, MOST_CALLS at most."""
    with snapshot(pool) as connection:
        rows = connection.execute(_calls(attempt_id, first, pool.dialect)).all()
        shown = rows[:MOST_CALLS]
        ids = [row.id for row in shown]
        heads = _heads(connection, [row.id for row in shown if row.reply_bytes < LARGE_REPLY])
        taken = {row.completion_id: row for row in connection.execute(_fates(ids))}
    named = _labels(shown) if first == 0 and len(rows) <= MOST_CALLS else {}
    entries = [
        _entry(row, depth, heads.get(row.id), taken.get(row.id), named.get(row.id)) for row, depth in ordered(shown)
    ]
    return CallsPage(entries, rows[MOST_CALLS].ordinal if len(rows) > MOST_CALLS else None)


def label_of(connection: Connection, call: Row[Any]) -> str | None:
    """Return the label that the tree shows of a call: its own, or in an open attempt what it would be now."""
    if call.label is not None:
        return str(call.label)
    columns = (completions.c.id, completions.c.label, completions.c.finish_reason, completions.c.shape)
    mine = completions.c.attempt_id == call.attempt_id
    query: Any = select(*columns).where(mine).order_by(completions.c.ordinal).limit(MOST_CALLS + 1)
    rows = connection.execute(query).all()
    return _labels(rows).get(call.id) if len(rows) <= MOST_CALLS else None


def ordered(rows: Sequence[Row[Any]]) -> list[tuple[Row[Any], int]]:
    """Return each call after the one it follows, with the number of forks above it."""
    known = {row.id for row in rows}
    following: dict[int | None, list[Row[Any]]] = defaultdict(list)
    for row in rows:
        following[row.follows if row.follows in known else None].append(row)
    waiting = [(row, 0) for row in reversed(following[None])]
    found = []
    while waiting:
        row, depth = waiting.pop()
        found.append((row, depth))
        children = following[row.id]
        waiting += [(child, depth + (len(children) > 1)) for child in reversed(children)]
    return found


def _calls(attempt_id: int, first: int, dialect: str) -> Any:
    columns = (
        *(completions.c.id, completions.c.ordinal, completions.c.follows, completions.c.prefix_of),
        *(completions.c.prefix_length, completions.c.label, completions.c.finish_reason, completions.c.versions),
        *(completions.c.started_at, completions.c.finished_at, completions.c.queued_seconds, completions.c.misfit),
        *(completions.c.untrainable, completions.c.untrainable_detail),
        (func.length(completions.c.prompt_tail, type_=Integer) // 4).label("tail"),
        (func.length(completions.c.sampled, type_=Integer) // 4).label("answer"),
        _stored_bytes(completions.c.reply, dialect).label("reply_bytes"),
        # a closed attempt has labels, so its shapes are not read
        case((completions.c.label.is_(None), completions.c.shape), else_=null()).label("shape"),
    )
    mine = (completions.c.attempt_id == attempt_id) & (completions.c.ordinal >= first)
    return select(*columns).where(mine).order_by(completions.c.ordinal).limit(MOST_CALLS + 1)


def _stored_bytes(column: Any, dialect: str) -> Any:
    """Return the bytes that a packed column takes; in SQLite the characters, where it is not compressed."""
    length = func.length if dialect == "sqlite" else func.pg_column_size
    return length(column, type_=Integer)


def _heads(connection: Connection, ids: Sequence[int]) -> dict[int, tuple[str, list[str]]]:
    """Return the first words and the tools of replies."""
    query = select(completions.c.id, completions.c.reply)
    found: dict[int, tuple[str, list[str]]] = {}
    for start in range(0, len(ids), REPLIES_AT_ONCE):
        some = query.where(completions.c.id.in_(ids[start : start + REPLIES_AT_ONCE]))
        found |= {row.id: head(row.reply) for row in connection.execute(some)}
    return found


def head(reply: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the first words of a reply, of its reasoning where it has no text, and the tools that it calls."""
    tools = [str(call["function"]["name"]) for call in reply.get("tool_calls") or ()]
    text = str(reply.get("content") or "") or str(reply.get("reasoning_content") or "")
    words = " ".join(text[: 4 * WORDS].split())
    return words if len(words) <= WORDS else f"{words[:WORDS]}…", tools


def _fates(ids: Sequence[int]) -> Any:
    return (
        select(fates, policy_versions.c.step, policy_versions.c.retired_at)
        .join_from(fates, policy_versions, policy_versions.c.id == fates.c.version_id)
        .where(fates.c.completion_id.in_(ids))
    )


@dataclass(frozen=True)
class _Unlabelled:
    id: int
    finish_reason: str
    shape: RequestShape | None


def _labels(rows: Sequence[Row[Any]]) -> dict[int, str | None]:
    """Return the labels that calls without one would have if their attempt ended now."""
    if all(row.label is not None for row in rows):
        return {}
    shapes = [_Unlabelled(row.id, row.finish_reason, msgspec.convert(row.shape, RequestShape | None)) for row in rows]
    return dict(labels(shapes))


def _entry(
    row: Row[Any], depth: int, words: tuple[str, list[str]] | None, fate: Row[Any] | None, label: str | None
) -> CallEntry:
    why = Untrained.from_columns(row.untrainable, row.untrainable_detail)
    text, tools = words or (f"a reply of {row.reply_bytes >> 10} KiB", [])
    return CallEntry(
        id=row.id,
        ordinal=row.ordinal,
        depth=depth,
        follows=row.follows,
        prefix_of=row.prefix_of,
        prefix_length=row.prefix_length,
        label=row.label or label,
        finish_reason=row.finish_reason,
        prompt_tokens=row.prefix_length + row.tail,
        new_tokens=row.tail,
        answer_tokens=row.answer,
        versions=list(dict.fromkeys(str(version) for version, _, _ in row.versions)),
        started_at=row.started_at,
        finished_at=row.finished_at,
        queued_seconds=row.queued_seconds,
        untrainable=None if why is None else str(why),
        misfit=row.misfit,
        trained=None if fate is None else fate.trained,
        left_out={} if fate is None else fate.left_out,
        step=None if fate is None else fate.step,
        rolled_back=fate is not None and fate.retired_at is not None,
        words=text,
        tools=tools,
    )
