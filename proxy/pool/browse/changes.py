"""What of a pool has changed since the last look, from its newest ids and times alone."""

from dataclasses import dataclass

from sqlalchemy import func, select

from proxy.pool.browse.runs import WORKERS, is_there, worker
from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.processes.owners import database_time
from proxy.pool.schema import attempts, completions, events, groups, interventions, policy_versions, runs

NEWEST_RUNS = 16
"""Runs whose groups and processes are looked at."""


@dataclass(frozen=True)
class Marks:
    """The newest rows of a pool."""

    completions: int
    attempts: int
    groups: int
    finished: float
    """When the newest group of the newest runs ended."""
    steps: int
    retired: int
    """The newest version that a rollback has retired, of the newest ones."""
    pushed: float
    interventions: int
    events: int
    working: list[tuple[int, bool, bool]]
    """Of the newest runs: the id, whether a harness works at it, and whether a trainer does."""

    def since(self, before: "Marks") -> list[str]:
        """Return the names of the marks that differ from those of an earlier look."""
        return [name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(before, name)]


def marks(pool: Pool) -> Marks:
    """Look at the pool."""
    newest_runs = select(runs.c.id, *WORKERS).order_by(runs.c.id.desc()).limit(NEWEST_RUNS)
    versions = select(policy_versions).order_by(policy_versions.c.id.desc()).limit(64).subquery()
    pushed = select(func.max(versions.c.id), func.max(versions.c.pushed_at))
    retired = select(func.max(versions.c.id)).where(versions.c.retired_at.is_not(None))
    with snapshot(pool) as connection:
        newest = {
            table.name: connection.scalar(select(func.max(table.c.id))) or 0
            for table in (completions, attempts, groups, interventions, events)
        }
        now = database_time(connection, pool)
        looked_at = connection.execute(newest_runs).all()
        ends = [
            connection.scalar(select(func.max(groups.c.finished_at)).where(groups.c.run_id == run.id)) or 0.0
            for run in looked_at
        ]
        step, pushed_at = connection.execute(pushed).one()
        gone = connection.scalar(retired) or 0
    return Marks(
        completions=newest["completions"],
        attempts=newest["attempts"],
        groups=newest["groups"],
        finished=max(ends, default=0.0),
        steps=step or 0,
        retired=gone,
        pushed=pushed_at or 0.0,
        interventions=newest["interventions"],
        events=newest["events"],
        working=[
            (
                run.id,
                is_there(worker(run.owner, run.owner_seen_at, now)),
                is_there(worker(run.trainer, run.trainer_seen_at, now)),
            )
            for run in looked_at
        ],
    )
