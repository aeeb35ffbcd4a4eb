"""Sessions: agents that no run started, newest first."""

from dataclasses import dataclass

from sqlalchemy import select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.schema import attempts, completions

PAGE = 25
"""Sessions of a page."""


@dataclass(frozen=True)
class SessionEntry:
    """A session as the list shows it."""

    id: int
    agent: str
    opened_at: float
    calls: int
    last_at: float | None
    """When its newest call ended; None: it has none."""


def sessions_page(pool: Pool, before: int | None = None) -> list[SessionEntry]:
    """Return the newest sessions, or those older than the one with the id `before`."""
    query = select(attempts.c.id, attempts.c.agent, attempts.c.opened_at).where(attempts.c.run_id.is_(None))
    if before is not None:
        query = query.where(attempts.c.id < before)
    newest = select(completions.c.ordinal, completions.c.finished_at).order_by(completions.c.ordinal.desc()).limit(1)
    found = []
    with snapshot(pool) as connection:
        for row in connection.execute(query.order_by(attempts.c.id.desc()).limit(PAGE)).all():
            last = connection.execute(newest.where(completions.c.attempt_id == row.id)).one_or_none()
            calls = 0 if last is None else last.ordinal + 1
            found.append(SessionEntry(row.id, row.agent, row.opened_at, calls, last.finished_at if last else None))
    return found
