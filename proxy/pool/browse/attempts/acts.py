"""What an attempt did, as events: read from its calls without their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, func, select

from proxy.pool.behaviour.event import Event
from proxy.pool.behaviour.read import events
from proxy.pool.browse.snapshot import snapshot
from proxy.pool.completions import observed
from proxy.pool.completions.labels import labels
from proxy.pool.completions.observed import Observed
from proxy.pool.completions.records import RequestShape
from proxy.pool.database import Pool
from proxy.pool.schema import completions

MOST_CALLS = 2000
"""Calls of an attempt whose events are read, from its beginning."""
MOST_EVENTS = 5000
AT_ONCE = 50
"""Calls that are loaded together."""
MOST_TEXT = 32 << 20
"""Characters of the replies that are in memory together; the calls behind them are left out."""


@dataclass
class Act:
    """A call without its tokens."""

    id: int
    ordinal: int
    follows: int | None
    finish_reason: str
    reply: dict[str, Any]
    shape: RequestShape | None
    label: str | None
    observed: Observed | None
    started_at: float
    finished_at: float


@dataclass(frozen=True)
class EventsPage:
    """The events of an attempt in order."""

    events: list[Event]
    ordinals: dict[int, int]
    """The place in the attempt of each call that an event names, by the call's id."""
    calls: int
    """Calls that were read."""
    more: bool
    """The attempt has further calls, or more events than are listed."""
    unknown: int
    """Calls whose requests showed nothing that is kept: failures of tools are unknown there, not absent."""


COLUMNS = (
    completions.c.id, completions.c.attempt_id, completions.c.ordinal, completions.c.follows,
    completions.c.finish_reason, completions.c.reply, completions.c.shape, completions.c.label, completions.c.observed,
    completions.c.started_at, completions.c.finished_at,
)  # fmt: skip


def acts_of(connection: Connection, attempt_id: int) -> list[Act]:
    """Return the first calls of an attempt, in the order of their commits, each with its label."""
    query: Any = select(*COLUMNS).where(completions.c.attempt_id == attempt_id).order_by(completions.c.ordinal)
    acts: list[Act] = []
    text = 0
    while len(acts) < MOST_CALLS and text < MOST_TEXT:
        behind = query.where(completions.c.ordinal > (acts[-1].ordinal if acts else -1))
        some = [_act(row) for row in connection.execute(behind.limit(min(AT_ONCE, MOST_CALLS - len(acts))))]
        if not some:
            break
        acts += some
        text += sum(size_of(act.reply) for act in some)
    return _labelled(acts)


def acts_of_each(connection: Connection, attempt_ids: Sequence[int], most: int) -> dict[int, list[Act]]:
    """Return the calls with ordinals below `most` of each of these attempts. All of them are in memory together."""
    some = completions.c.attempt_id.in_(attempt_ids) & (completions.c.ordinal < most)
    acts: dict[int, list[Act]] = {attempt_id: [] for attempt_id in attempt_ids}
    query: Any = select(*COLUMNS).where(some).order_by(completions.c.attempt_id, completions.c.ordinal)
    for row in connection.execute(query):
        acts[row.attempt_id].append(_act(row))
    return {attempt_id: _labelled(own) for attempt_id, own in acts.items()}


def _labelled(acts: list[Act]) -> list[Act]:
    """Give calls without a label the one that they would have if their attempt ended now."""
    if any(act.label is None and act.shape is not None for act in acts):
        named = labels(acts)
        for act in acts:
            act.label = act.label or named.get(act.id)
    return acts


def attempt_events(pool: Pool, attempt_id: int) -> EventsPage:
    """Return what an attempt did."""
    last = select(func.max(completions.c.ordinal)).where(completions.c.attempt_id == attempt_id)
    with snapshot(pool) as connection:
        acts = acts_of(connection, attempt_id)
        newest = connection.scalar(last)
    found = events(acts)
    more = bool(acts) and acts[-1].ordinal != newest or len(found) > MOST_EVENTS
    shown = found[:MOST_EVENTS]
    named = {event.completion for event in shown}
    ordinals = {act.id: act.ordinal for act in acts if act.id in named}
    return EventsPage(shown, ordinals, len(acts), more, sum(act.observed is None for act in acts))


def size_of(reply: dict[str, Any]) -> int:
    """Return the characters of what a reply says and calls."""
    calls = (str(call["function"].get("arguments") or "") for call in reply.get("tool_calls") or ())
    texts = (reply.get("content") or "", reply.get("reasoning_content") or "", *calls)
    return sum(len(text) for text in texts)


def _act(row: Row[Any]) -> Act:
    return Act(
        id=row.id,
        ordinal=row.ordinal,
        follows=row.follows,
        finish_reason=row.finish_reason,
        reply=row.reply,
        shape=msgspec.convert(row.shape, RequestShape | None),
        label=row.label,
        observed=None if row.observed is None else observed.unpack(row.observed),
        started_at=row.started_at,
        finished_at=row.finished_at,
    )
