"""Finished rollouts with their completions, whatever became of their group: for imitation, checks and replay."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import of_attempts
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.schema import attempts, completions, groups, proxies, rollouts, tasks

AT_ONCE = 500
"""Attempts per query: databases limit the number of parameters."""


@dataclass(frozen=True)
class RecordedRollout:
    """A finished rollout and the completions of its final attempt. A missing reward is None."""

    rollout_id: int
    group_id: int
    reward: float | None
    failure: str | None
    completions: list[Completion]


@dataclass(frozen=True)
class ReplayableRollout:
    """A finished rollout with all that a replay of it needs."""

    task: dict[str, Any]
    agent: str
    attempt_id: int
    group_id: int
    member: int
    calls: int
    reward: float | None
    failure: str | None


def finished_rollout(pool: Pool, run_id: int, rollout_id: int) -> ReplayableRollout:
    """Return a finished rollout of a run, held out or not; UserError when the run has none with this id."""
    calls = select(func.count()).where(completions.c.attempt_id == rollouts.c.attempt_id).scalar_subquery()
    columns = (tasks.c.spec, attempts.c.agent, attempts.c.id, groups.c.id, rollouts.c.member, calls)
    query = (
        select(*columns, rollouts.c.reward, rollouts.c.failure)
        .join_from(rollouts, groups)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .join(attempts, attempts.c.id == rollouts.c.attempt_id)
        .where(groups.c.run_id == run_id, rollouts.c.id == rollout_id)
    )
    with pool.read() as connection:
        row = connection.execute(query).one_or_none()
    if row is None:
        raise UserError(f"the run has no finished rollout {rollout_id}; choose one listed in results.jsonl")
    return ReplayableRollout(*row)


def finished_rollouts(pool: Pool, run_id: int) -> list[RecordedRollout]:
    """Return the finished rollouts of a run that have an attempt, in queue order, without held-out groups."""
    query = (
        select(rollouts.c.id, rollouts.c.group_id, rollouts.c.attempt_id, rollouts.c.reward, rollouts.c.failure)
        .join_from(rollouts, groups)
        .where(groups.c.run_id == run_id, groups.c.purpose.is_(None))
        .where(rollouts.c.finished_at.is_not(None), rollouts.c.attempt_id.is_not(None))
        .order_by(groups.c.queue_index, rollouts.c.member)
    )
    with pool.read() as connection:
        rows = connection.execute(query).all()
        completions = of_attempts(connection, [row.attempt_id for row in rows])
    return [RecordedRollout(row.id, row.group_id, row.reward, row.failure, completions[row.attempt_id]) for row in rows]


def tokenizers(pool: Pool, attempt_ids: Iterable[int]) -> set[str]:
    """Return the fingerprints of the tokenizers that these attempts were recorded with, as far as they are known.

    See proxy/pool/tokenizer_fingerprint.py.
    """
    query = (
        select(proxies.c.tokenizer).join_from(completions, proxies, proxies.c.id == completions.c.proxy_id).distinct()
    )
    known = query.where(proxies.c.tokenizer.is_not(None))
    ids, fingerprints = sorted(set(attempt_ids)), set[str]()
    with pool.read() as connection:
        for start in range(0, len(ids), AT_ONCE):
            some = ids[start : start + AT_ONCE]
            fingerprints.update(connection.scalars(known.where(completions.c.attempt_id.in_(some))))
    return fingerprints
