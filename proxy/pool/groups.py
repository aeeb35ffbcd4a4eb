"""Groups of rollouts of one task: RUNNING, then DONE or TOMBSTONE; the scheduler takes them from there.

A group is DONE when every rollout has its outcome and more than half of them have a reward; otherwise it is a
TOMBSTONE, which the queue passes over (GLM-5, arXiv 2602.15763 section 4.1: a group is kept iff n_valid > G/2).
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from proxy.pool.database import Pool, insert_row, retried
from proxy.pool.runs import lock_run
from proxy.pool.schema import TOKENS, attempts, completions, groups, rollouts, tasks


@dataclass(frozen=True)
class OpenRollout:
    """A rollout without an outcome, and the task it works on."""

    rollout_id: int
    group_id: int
    member: int
    task: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rollout came to. `reward` None is a missing reward, which is never 0."""

    attempt_id: int | None
    reward: float | None
    failure: str | None = None
    detail: str = ""
    reward_parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutRow:
    """One rollout as tables and results.jsonl show it. Counts and seconds are of its last attempt."""

    task: str
    group: int
    member: int
    agent: str | None
    reward: float | None
    failure: str | None
    detail: str | None
    finished: bool
    attempts: int
    completions: int
    trainable: int
    sampled_tokens: int
    seconds: float | None


@retried
def open_group(pool: Pool, run_id: int, task: dict[str, Any], size: int) -> list[OpenRollout]:
    """Queue a group of `size` rollouts of a task, in state RUNNING, at the end of the run's queue."""
    with pool.write() as connection:
        lock_run(connection, run_id)
        last = connection.scalar(select(func.max(groups.c.queue_index)).where(groups.c.run_id == run_id))
        values = {
            "run_id": run_id,
            "queue_index": 0 if last is None else last + 1,
            "task_id": _task_id(connection, run_id, task),
            "size": size,
            "state": "RUNNING",
            "created_at": time.time(),
        }
        group_id = insert_row(connection, groups, values)
        connection.execute(insert(rollouts), [{"group_id": group_id, "member": member} for member in range(size)])
        ids = connection.scalars(
            select(rollouts.c.id).where(rollouts.c.group_id == group_id).order_by(rollouts.c.member)
        ).all()
    return [OpenRollout(rollout_id, group_id, member, task) for member, rollout_id in enumerate(ids)]


def _task_id(connection: Connection, run_id: int, task: dict[str, Any]) -> int:
    query = select(tasks.c.id).where(tasks.c.run_id == run_id, tasks.c.name == task["id"])
    found = connection.scalar(query)
    if found is not None:
        return found
    values = {"run_id": run_id, "name": task["id"], "domain": task.get("domain", "agent"), "spec": task}
    return insert_row(connection, tasks, values)


def open_rollouts(pool: Pool, run_id: int) -> list[OpenRollout]:
    """The run's rollouts without an outcome, in queue order: what a resumed run takes up first."""
    query = (
        select(rollouts.c.id, rollouts.c.group_id, rollouts.c.member, tasks.c.spec)
        .join_from(rollouts, groups)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .where(groups.c.run_id == run_id, rollouts.c.finished_at.is_(None), groups.c.state == "RUNNING")
        .order_by(groups.c.queue_index, rollouts.c.member)
    )
    with pool.read() as connection:
        return [OpenRollout(*row) for row in connection.execute(query)]


def known_tasks(pool: Pool, run_id: int) -> Counter[str]:
    """Task id -> how many groups of it this run has opened."""
    query = (
        select(tasks.c.name, func.count(groups.c.id))
        .join_from(groups, tasks, tasks.c.id == groups.c.task_id)
        .where(groups.c.run_id == run_id)
        .group_by(tasks.c.name)
    )
    with pool.read() as connection:
        return Counter({name: count for name, count in connection.execute(query)})


@retried
def finish_rollout(pool: Pool, rollout_id: int, outcome: Outcome) -> None:
    """Write a rollout's outcome and, with the last one, close its group. A second outcome changes nothing."""
    values = {
        "attempt_id": outcome.attempt_id,
        "reward": outcome.reward,
        "reward_parts": outcome.reward_parts,
        "failure": outcome.failure,
        "detail": outcome.detail,
        "finished_at": time.time(),
    }
    with pool.write() as connection:
        found = select(groups.c.id, groups.c.run_id).join_from(rollouts, groups).where(rollouts.c.id == rollout_id)
        group = connection.execute(found).one()
        lock_run(connection, group.run_id)  # the last two members must see each other, a lease whole groups only
        unfinished = rollouts.c.finished_at.is_(None)
        connection.execute(update(rollouts).where(rollouts.c.id == rollout_id, unfinished).values(values))
        _close_group(connection, group.id)


def _close_group(connection: Connection, group_id: int) -> None:
    counts = select(func.count(), func.count(rollouts.c.finished_at), func.count(rollouts.c.reward))
    size, finished, valid = connection.execute(counts.where(rollouts.c.group_id == group_id)).one()
    if finished < size:
        return
    values: dict[str, Any] = {"state": "DONE", "finished_at": time.time()}
    if valid * 2 <= size:
        values |= {"state": "TOMBSTONE", "reason": f"{valid} of {size} rollouts have a reward; more than half must"}
    running = (groups.c.id == group_id) & (groups.c.state == "RUNNING")
    connection.execute(update(groups).where(running).values(values))


def run_summary(pool: Pool, run_id: int) -> list[RolloutRow]:
    """Every rollout of a run in queue order, with the counts of its last attempt."""
    newest = (
        select(attempts.c.rollout_id, func.max(attempts.c.id).label("id"), func.count().label("tries"))
        .where(attempts.c.run_id == run_id)
        .group_by(attempts.c.rollout_id)
        .subquery()
    )
    counts = (
        select(
            completions.c.attempt_id,
            func.count().label("total"),
            func.count().filter(completions.c.untrainable.is_(None)).label("trainable"),
            func.sum(TOKENS).label("tokens"),
        )
        .group_by(completions.c.attempt_id)
        .subquery()
    )
    query = (
        select(
            tasks.c.name,
            groups.c.queue_index,
            rollouts.c.member,
            attempts.c.agent,
            rollouts.c.reward,
            rollouts.c.failure,
            rollouts.c.detail,
            rollouts.c.finished_at.is_not(None),
            func.coalesce(newest.c.tries, 0),
            func.coalesce(counts.c.total, 0),
            func.coalesce(counts.c.trainable, 0),
            func.coalesce(counts.c.tokens, 0),
            attempts.c.closed_at - attempts.c.opened_at,
        )
        .join_from(rollouts, groups)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .outerjoin(newest, newest.c.rollout_id == rollouts.c.id)
        .outerjoin(attempts, attempts.c.id == newest.c.id)
        .outerjoin(counts, counts.c.attempt_id == newest.c.id)
        .where(groups.c.run_id == run_id)
        .order_by(groups.c.queue_index, rollouts.c.member)
    )
    with pool.read() as connection:
        return [RolloutRow(*row) for row in connection.execute(query)]
