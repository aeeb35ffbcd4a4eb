"""A run's queue as the harness sees it: groups opened so far, groups to replace, groups lost to failures."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from proxy.pool.database import Pool
from proxy.pool.rollouts.failures import CAP, FAILURES, REPLACED, SPOILED_WINDOW
from proxy.pool.rollouts.groups import GroupOptions
from proxy.pool.rollouts.masked import MASKED
from proxy.pool.schema import groups, rollouts, tasks

SETTLED_GROUPS = 3
"""A task is settled when all rewards of so many of its last groups are equal. With groups of 8, a task that is solved 9
times in 10 passes for settled once in 12; with one group it would be every second time."""


@dataclass(frozen=True)
class PlannedGroup:
    """A group to open: a new one, or the replacement of a filtered one."""

    task: dict[str, Any]
    size: int
    options: GroupOptions


def opened_in_order(pool: Pool, run_id: int) -> int:
    """Count the groups that the run has opened in the order of its tasks. Replacements do not count."""
    with pool.read() as connection:
        query = select(func.count()).where(groups.c.run_id == run_id, groups.c.replaces.is_(None))
        return connection.scalar(query) or 0


def opened(pool: Pool, run_id: int) -> int:
    """Count the groups that the run has opened, replacements too."""
    with pool.read() as connection:
        return connection.scalar(select(func.count()).where(groups.c.run_id == run_id)) or 0


def places(pool: Pool, run_id: int) -> list[int]:
    """Return the places of the tasks of a run that skips settled ones, in the order in which it opened their groups."""
    query = select(groups.c.queue_index, groups.c.place).where(groups.c.run_id == run_id, groups.c.place.is_not(None))
    with pool.read() as connection:
        return [row.place for row in sorted(connection.execute(query), key=lambda row: row.queue_index)]


def is_settled(pool: Pool, run_id: int, task: str) -> bool:
    """Whether a task is always or never solved: the last SETTLED_GROUPS finished groups of it have equal rewards.

    A task of which one of these groups has no reward is not settled. Groups held out for evaluation do not count.
    """
    last = (
        select(groups.c.id)
        .join_from(groups, tasks, tasks.c.id == groups.c.task_id)
        .where(tasks.c.run_id == run_id, tasks.c.name == task, groups.c.purpose.is_(None), groups.c.state != "RUNNING")
        .order_by(groups.c.queue_index.desc())
        .limit(SETTLED_GROUPS)
        .subquery()
    )
    query = select(rollouts.c.group_id, rollouts.c.reward).join(last, last.c.id == rollouts.c.group_id)
    with pool.read() as connection:
        rows = connection.execute(query.where(rollouts.c.reward.is_not(None) & ~MASKED)).all()
    return len({row.group_id for row in rows}) == SETTLED_GROUPS and len({row.reward for row in rows}) == 1


def replacements(pool: Pool, run_id: int, redundant: int) -> list[PlannedGroup]:
    """Return the replacements that a run still has to open: one for each filtered group, REPLACED times at most."""
    kinds = [kind for kind, failure in FAILURES.items() if failure.treatment == "filter"]
    with pool.read() as connection:
        filtered = select(groups.c.id, groups.c.replaces).where(groups.c.run_id == run_id, groups.c.failure.in_(kinds))
        roots = {row.replaces or row.id for row in connection.execute(filtered)}
        if not roots:
            return []
        line = groups.c.id.in_(roots) | ((groups.c.run_id == run_id) & groups.c.replaces.in_(roots))
        query = select(groups, tasks.c.spec).join_from(groups, tasks, tasks.c.id == groups.c.task_id)
        chains = defaultdict(list)
        for row in connection.execute(query.where(line).order_by(groups.c.id)):
            chains[row.replaces or row.id].append(row)
    return [
        PlannedGroup(
            row.spec,
            row.size,
            GroupOptions(redundant=redundant, agent=row.agent, held_out=row.purpose is not None, replaces=root),
        )
        for root, chain in chains.items()
        for row in chain[-1:]
        if row.failure in kinds and len(chain) <= REPLACED
    ]


def lost_groups(pool: Pool, run_id: int, domain: str) -> list[bool]:
    """Return, for the newest finished groups of a domain (oldest first), whether each was lost to failures."""
    query = (
        select(groups.c.failure)
        .join_from(groups, tasks, tasks.c.id == groups.c.task_id)
        .where(groups.c.run_id == run_id, tasks.c.domain == domain, groups.c.state != "RUNNING")
        .order_by(groups.c.finished_at.desc(), groups.c.id.desc())
        .limit(CAP.window)
    )
    with pool.read() as connection:
        return [failure is not None for failure in reversed(connection.scalars(query).all())]


def spoiled_of(pool: Pool, run_id: int, task: str) -> int:
    """Return how many of a task's newest finished rollouts are spoiled."""
    task_id = select(tasks.c.id).where(tasks.c.run_id == run_id, tasks.c.name == task)
    query = (
        select(rollouts.c.failure)
        .join_from(rollouts, groups, groups.c.id == rollouts.c.group_id)
        .where(groups.c.task_id == task_id.scalar_subquery(), rollouts.c.finished_at.is_not(None))
        .order_by(rollouts.c.finished_at.desc(), rollouts.c.id.desc())
        .limit(SPOILED_WINDOW)
    )
    with pool.read() as connection:
        return connection.scalars(query).all().count("spoiled")
