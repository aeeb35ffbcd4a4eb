"""Builds the index piece by piece: what is new first, then what is older, until all of the pool is in it.

Each piece is one transaction of the index, so a builder that is killed goes on where it was. Rows of a pool become
visible in another order than their ids, so what is younger than SETTLE_SECONDS waits.
"""

import logging
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, exists, func, select, tuple_

from proxy.pool.behaviour.read import events
from proxy.pool.browse.attempts.acts import acts_of_each
from proxy.pool.browse.snapshot import snapshot
from proxy.pool.completions import observed
from proxy.pool.database import Pool
from proxy.pool.processes.owners import database_time
from proxy.pool.schema import attempts, completions, groups, rollouts, runs, storable, tasks
from proxy.pool.search.index import keep, meta

log = logging.getLogger(__name__)
CALLS = 1000
"""Calls of a piece."""
GROUPS = 128
"""Groups of a piece."""
ATTEMPTS_AT_ONCE = 32
"""Attempts whose calls are in memory together."""
SECONDS = 120.0
"""Maximum seconds that a piece takes to read."""
MOST_TEXT = 100_000
"""Characters of one call that are indexed of its reply."""
MOST_CALLS = 400
"""Calls of a rollout whose events are counted."""
SETTLE_SECONDS = 5.0


@dataclass(frozen=True)
class Progress:
    """How much of a pool is in the index."""

    calls: int
    """Calls that are in it."""
    newest: int
    """The newest call that is in it, by id, and the oldest one; all in between are, too."""
    oldest: int
    last: int
    """The newest call of the pool."""
    rollouts: int
    whole: bool
    """All calls are in it, those of the last seconds too."""
    outcomes_whole: bool
    """All rollouts of finished groups are."""


class Builder:
    """Builds the index of one pool."""

    def __init__(self, pool: Pool, index: sqlite3.Connection):
        self._pool = pool
        self._index = index
        self._warned = False

    def step(self) -> bool:
        """Add a piece of everything; return whether there is more to add now."""
        more = self._calls()
        added, whole = self._outcomes()
        if meta(self._index, "outcomes whole") != whole:
            keep(self._index, "outcomes whole", whole)
        return more or added

    def _calls(self) -> bool:
        newest, oldest = meta(self._index, "newest"), meta(self._index, "oldest")
        with snapshot(self._pool, SECONDS) as connection:
            until = database_time(connection, self._pool) - SETTLE_SECONDS
            last = connection.scalar(select(func.max(completions.c.id))) or 0
            if newest is None:
                rows = connection.execute(_calls_query().order_by(completions.c.id.desc()).limit(CALLS)).all()
            else:
                ahead = _calls_query().where(completions.c.id > int(newest)).order_by(completions.c.id)
                rows = connection.execute(ahead.limit(CALLS)).all()
                if not rows and oldest is not None and oldest > 0:
                    back = _calls_query().where(completions.c.id < int(oldest)).order_by(completions.c.id.desc())
                    rows = connection.execute(back.limit(CALLS)).all()
                    if not rows:
                        oldest = 0
        rows = sorted(rows, key=lambda row: row.id)
        fresh = next((at for at, row in enumerate(rows) if row.finished_at > until), len(rows))
        settled = rows[:fresh]
        with self._piece():
            for row in settled:
                self._add(row)
            if settled:
                keep(self._index, "newest", max(settled[-1].id, newest or 0))
                keep(self._index, "oldest", settled[0].id if oldest is None else min(settled[0].id, oldest))
            elif oldest == 0:
                keep(self._index, "oldest", 0)
            keep(self._index, "calls", (meta(self._index, "calls") or 0) + len(settled))
            keep(self._index, "last", last)
        return bool(settled)

    def _add(self, row: Row[Any]) -> None:
        seen = None if row.observed is None else observed.unpack(row.observed)
        results = "\n".join(f"{each.head}\n{each.tail}" for each in seen.results) if seen else ""
        self._index.execute(
            "insert or replace into calls values (?, ?, ?, ?)", (row.id, row.attempt_id, row.rollout_id, row.run_id)
        )
        self._index.execute(
            "insert into words (rowid, reply, results) values (?, ?, ?)",
            (row.id, storable(words_of(row.reply)), storable(results)),
        )

    def _outcomes(self) -> tuple[bool, bool]:
        """Add finished groups of every run: newer ones than are known, or else older ones.

        Return whether there were any to add, and whether all are in, those of the last seconds too.
        """
        with snapshot(self._pool, SECONDS) as connection:
            run_ids = list(connection.scalars(select(runs.c.id).order_by(runs.c.id.desc())))
        added, whole = False, True
        for run_id in run_ids:
            some, all_in = self._of_run(run_id)
            added, whole = added or some, whole and all_in
        return added, whole

    def _of_run(self, run_id: int) -> tuple[bool, bool]:
        """Add some groups of a run; return whether there were any to add, and whether all of the run are in."""
        ahead, back = (self._mark(run_id, name) for name in ("ahead", "back"))
        place = tuple_(groups.c.finished_at, groups.c.id)
        query = select(groups.c.id, groups.c.finished_at).where(
            groups.c.run_id == run_id, groups.c.finished_at.is_not(None)
        )
        rising = query.order_by(groups.c.finished_at, groups.c.id).limit(GROUPS)
        falling = query.order_by(groups.c.finished_at.desc(), groups.c.id.desc()).limit(GROUPS)
        with snapshot(self._pool, SECONDS) as connection:
            until = database_time(connection, self._pool) - SETTLE_SECONDS
            settled = groups.c.finished_at < until
            if ahead is None:
                some = connection.execute(falling.where(settled)).all()
            else:
                some = connection.execute(rising.where(settled, place > tuple_(*ahead))).all()
                if not some and back is not None:
                    some = connection.execute(falling.where(place < tuple_(*back))).all()
            if not some:
                waiting = exists().where(groups.c.run_id == run_id, groups.c.finished_at >= until)
                return False, not connection.scalar(select(waiting))
            members = connection.execute(_members([row.id for row in some])).all()
            counts = self._events(connection, members)
        places = sorted((row.finished_at, row.id) for row in some)
        with self._piece():
            self._put(members, counts, run_id)
            keep(self._index, "rollouts", (meta(self._index, "rollouts") or 0) + len(members))
            self._set_mark(run_id, "ahead", max([places[-1], *([ahead] if ahead else [])]))
            self._set_mark(run_id, "back", min([places[0], *([back] if back else [])]))
        return True, False

    def _events(self, connection: Connection, members: Sequence[Row[Any]]) -> dict[int, Counter[str]]:
        """Count the events of rollouts by kind. A rollout that cannot be read has none, and the rest go on."""
        rollout_of = {row.attempt_id: row.id for row in members if row.attempt_id is not None}
        ids = sorted(rollout_of)
        counts = {}
        for start in range(0, len(ids), ATTEMPTS_AT_ONCE):
            some = acts_of_each(connection, ids[start : start + ATTEMPTS_AT_ONCE], MOST_CALLS)
            for attempt_id, acts in some.items():
                try:
                    counts[rollout_of[attempt_id]] = Counter(str(event.kind) for event in events(acts))
                except Exception:  # a damaged row, or a bug: one rollout must not end the index of a whole pool
                    if not self._warned:
                        log.exception("rollout %d and perhaps more have no events in the index", rollout_of[attempt_id])
                    self._warned = True
        return counts

    def _put(self, members: Sequence[Row[Any]], counts: dict[int, Counter[str]], run_id: int) -> None:
        for row in members:
            seconds = None if row.closed_at is None else row.closed_at - row.opened_at
            values = (
                row.id, run_id, row.group_id, row.agent, row.domain, row.task, row.reward, row.failure,
                row.completions, row.sampled_tokens, seconds, row.finished_at,
            )  # fmt: skip
            self._index.execute(f"insert or replace into outcomes values ({', '.join('?' * len(values))})", values)
            for kind, count in counts.get(row.id, {}).items():
                self._index.execute("insert or replace into events values (?, ?, ?)", (kind, row.id, count))

    @contextmanager
    def _piece(self) -> Iterator[None]:
        """Write all of the block, or nothing."""
        self._index.execute("begin immediate")
        try:
            yield
        except BaseException:  # also an interruption: half a block must not stay
            self._index.execute("rollback")
            raise
        self._index.execute("commit")

    def _mark(self, run_id: int, name: str) -> tuple[float, int] | None:
        at, id = meta(self._index, f"{name} {run_id} at"), meta(self._index, f"{name} {run_id} id")
        return None if at is None or id is None else (at, int(id))

    def _set_mark(self, run_id: int, name: str, place: tuple[float, int]) -> None:
        keep(self._index, f"{name} {run_id} at", place[0])
        keep(self._index, f"{name} {run_id} id", place[1])


def words_of(reply: dict[str, Any]) -> str:
    """Return what a reply says, thinks and calls, cut to MOST_TEXT characters."""
    calls = [
        f"{call['function']['name']} {call['function'].get('arguments') or ''}"
        for call in reply.get("tool_calls") or ()
    ]
    parts = [reply.get("content") or "", *calls, reply.get("reasoning_content") or ""]
    return "\n".join(part if isinstance(part, str) else str(part) for part in parts)[:MOST_TEXT]


def progress(index: sqlite3.Connection) -> Progress:
    """Return how much is in an index."""
    newest, oldest, last, calls = (int(meta(index, name) or 0) for name in ("newest", "oldest", "last", "calls"))
    rollouts_in, outcomes = int(meta(index, "rollouts") or 0), bool(meta(index, "outcomes whole"))
    return Progress(calls, newest, oldest, last, rollouts_in, newest >= last and oldest == 0, outcomes)


def _calls_query() -> Any:
    columns = (completions.c.id, completions.c.attempt_id, completions.c.reply, completions.c.observed)
    return select(*columns, completions.c.finished_at, attempts.c.rollout_id, attempts.c.run_id).join_from(
        completions, attempts, attempts.c.id == completions.c.attempt_id
    )


def _members(group_ids: Sequence[int]) -> Any:
    return (
        select(rollouts, attempts.c.opened_at, attempts.c.closed_at, tasks.c.name.label("task"), tasks.c.domain)
        .add_columns(func.coalesce(groups.c.agent, attempts.c.agent).label("agent"))
        .join_from(rollouts, groups, groups.c.id == rollouts.c.group_id)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .outerjoin(attempts, attempts.c.id == rollouts.c.attempt_id)
        .where(rollouts.c.group_id.in_(group_ids))
    )
