"""The audit log: who was refused and what administrators asked, as rows of the table `events`.

Rows are written by a thread of their own, out of a bounded queue, so that a slow or locked database delays no answer.
Equal events are one row per ten minutes, which says how many there were. Keys that were issued and revoked need no rows
here: they are rows of `attempts`, and `audit_lines` shows both. A killed process loses what it has not written yet.
"""

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import insert, select

from proxy.pool.database import Pool
from proxy.pool.errors import PoolError
from proxy.pool.schema import attempts, events, runs

log = logging.getLogger(__name__)
MAX_WAITING = 1000
"""Different events that wait to be written. Further ones are counted, and a row says how many."""
REPEAT_SECONDS = 600
"""How long equal events are counted before another row says how many there were."""
PAUSE_SECONDS = 1.0
"""Time between two transactions; a failed one is tried again after it."""
STOP_SECONDS = 5.0
"""How long the end of the process waits for the last rows."""

Event = tuple[str, str]
"""Kind and detail."""


@dataclass
class _Repeats:
    count: int
    """Events that no row has told of yet."""
    due: float
    """When the next row may tell of them."""
    at: float = 0.0
    """Unix time of the last one."""


class AuditLog:
    """Writes events of this process to its pool. Any thread may note them; noting one takes microseconds."""

    def __init__(self, pool: Pool):
        self._pool = pool
        # Any thread notes events while the log's own thread takes them off, which sleeps as long as there are none.
        self._changed = threading.Condition()
        self._waiting: dict[Event, _Repeats] = {}
        self._lost = 0
        self._closing = False
        # A daemon: while the database is locked, the process can end without it.
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    def note(self, kind: str, detail: str) -> None:
        """Write an event soon. Nothing waits for it."""
        with self._changed:
            repeats = self._waiting.get((kind, detail))
            if repeats is None:
                if len(self._waiting) >= MAX_WAITING:
                    self._lost += 1
                    return
                repeats = self._waiting[kind, detail] = _Repeats(0, 0.0)
            repeats.count += 1
            repeats.at = time.time()
            if repeats.count == 1:
                self._changed.notify()

    def close(self) -> None:
        """Write what waits and return; after STOP_SECONDS return all the same, and say so. Blocks."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(STOP_SECONDS)
        with self._changed:
            left = self._lost + sum(repeats.count for repeats in self._waiting.values())
        if left:
            log.warning("the audit log is not complete: the pool did not take its last %d events", left)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._due(), PAUSE_SECONDS * 60)
                closing, batch, lost = self._closing, self._due(), self._lost
            written = self._write(batch, lost)
            if written:
                self._settle(batch, lost)
            if closing:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closing, PAUSE_SECONDS)

    def _due(self) -> list[tuple[Event, int, float]]:
        """Events with their counts that may be written now."""
        now = time.monotonic()
        ready = self._waiting.items()
        return [(event, one.count, one.at) for event, one in ready if one.count and (self._closing or one.due <= now)]

    def _write(self, batch: list[tuple[Event, int, float]], lost: int) -> bool:
        rows = [
            {"at": at, "kind": kind, "detail": detail if count == 1 else f"{detail} ({count} times)"}
            for (kind, detail), count, at in batch
        ]
        if lost:
            rows.append({"at": time.time(), "kind": "events_lost", "detail": f"{lost} events did not fit"})
        try:
            if rows:
                with self._pool.write() as connection:
                    connection.execute(insert(events), rows)
        except PoolError as error:
            log.warning("the audit log waits for the pool: %s", error)
            return False
        return True

    def _settle(self, batch: list[tuple[Event, int, float]], lost: int) -> None:
        """Take off what was written, and forget events that were not repeated."""
        now = time.monotonic()
        with self._changed:
            self._lost -= lost
            for event, count, _ in batch:
                self._waiting[event].count -= count
                self._waiting[event].due = now + REPEAT_SECONDS
            for event in [event for event, one in self._waiting.items() if not one.count and one.due <= now]:
                del self._waiting[event]


def audit_lines(pool: Pool) -> Iterator[str]:
    """Yield a line for each event, in the order of time: keys issued and revoked, keys refused, calls of
    administrators, and what runs noted."""
    names = select(runs.c.id, runs.c.name)
    told = select(events.c.at, events.c.kind, events.c.detail, events.c.run_id)
    keys = select(
        attempts.c.id, attempts.c.opened_at, attempts.c.closed_at, attempts.c.agent, attempts.c.failure,
        attempts.c.run_id,
    )  # fmt: skip
    with pool.read() as connection:
        run = {row.id: f"run {row.name}: " for row in connection.execute(names)}
        lines = [(row.at, row.kind, run.get(row.run_id, "") + row.detail) for row in connection.execute(told)]
        for row in connection.execute(keys):
            what = f"{run.get(row.run_id, '')}attempt {row.id} of {row.agent}"
            lines.append((row.opened_at, "key_issued", what))
            if row.closed_at is not None:
                lines.append((row.closed_at, "key_revoked", f"{what}, {row.failure}" if row.failure else what))
    for at, kind, detail in sorted(lines):
        plain = "".join(character if character.isprintable() else " " for character in detail)
        yield f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(at))} {kind:<12} {plain}"
