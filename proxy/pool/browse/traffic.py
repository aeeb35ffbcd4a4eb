"""The traffic of a pool: its newest calls by run."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.schema import attempts, completions

NEWEST_CALLS = 2000
"""The newest calls of the pool, from which its traffic is counted."""


@dataclass(frozen=True)
class RunTraffic:
    """Calls by run among the newest calls of the pool."""

    run: str
    calls: int
    first_at: float
    last_at: float
    tokens: int
    model_seconds: float


def traffic(pool: Pool, names: Mapping[int, str]) -> list[RunTraffic]:
    """Count the newest calls of the pool by run."""
    with snapshot(pool) as connection:
        return traffic_of(connection, names)[1]


def traffic_of(connection: Connection, names: Mapping[int, str]) -> tuple[int, list[RunTraffic]]:
    """Count the newest calls of the pool by run; return their number, too. `names`: the runs that are named."""
    newest = connection.scalar(select(func.max(completions.c.id))) or 0
    owner = select(attempts.c.run_id).where(attempts.c.id == completions.c.attempt_id).scalar_subquery()
    columns = (completions.c.started_at, completions.c.finished_at, func.length(completions.c.sampled).label("bytes"))
    query = select(*columns, owner.label("run_id")).where(completions.c.id > newest - NEWEST_CALLS)
    calls = defaultdict(list)
    for row in connection.execute(query.limit(NEWEST_CALLS)):
        calls[names.get(row.run_id, "sessions" if row.run_id is None else "older runs")].append(row)
    found = [
        RunTraffic(
            run=name,
            calls=len(rows),
            first_at=min(row.finished_at for row in rows),
            last_at=max(row.finished_at for row in rows),
            tokens=sum(row.bytes for row in rows) // 4,
            model_seconds=sum(row.finished_at - row.started_at for row in rows),
        )
        for name, rows in sorted(calls.items())
    ]
    return sum(each.calls for each in found), found
