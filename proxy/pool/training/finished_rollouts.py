"""Reads finished rollouts, whether or not their group was trained: to imitate, check and replay them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import of_attempts
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.masked import MASKED
from proxy.pool.schema import attempts, completions, groups, proxies, rollouts, tasks

AT_ONCE = 500
"""Attempts per query: databases limit the number of parameters."""


@dataclass(frozen=True)
class RecordedRollout:
    """A finished rollout, and the completions of the attempt that gave its outcome. A missing reward is None."""

    rollout_id: int
    group_id: int
    reward: float | None
    failure: str | None
    masked: bool
    """It cheated, and is masked: nothing learns from it."""
    completions: list[Completion]


@dataclass(frozen=True)
class ReplayableRollout:
    """A finished rollout with all that a replay of it needs."""

    task: dict[str, Any]
    agent: str
    attempt_id: int
    group_id: int
    member: int
    """Its number within the group, from 0."""
    calls: int
    """How many completions its attempt has."""
    reward: float | None
    failure: str | None


def finished_rollout(pool: Pool, run_id: int, rollout_id: int) -> ReplayableRollout:
    """Return a finished rollout, also one for evaluation. UserError when none with an attempt has this id, or when its
    completions have left the pool."""
    calls = select(func.count()).where(completions.c.attempt_id == rollouts.c.attempt_id).scalar_subquery()
    columns = (tasks.c.spec, attempts.c.agent, attempts.c.id, groups.c.id, rollouts.c.member, calls)
    query = (
        select(*columns, rollouts.c.reward, rollouts.c.failure, groups.c.dropped_at)
        .join_from(rollouts, groups)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .join(attempts, attempts.c.id == rollouts.c.attempt_id)
        .where(groups.c.run_id == run_id, rollouts.c.id == rollout_id)
    )
    with pool.read() as connection:
        row = connection.execute(query).one_or_none()
    if row is None:
        raise UserError(f"the run has no finished rollout {rollout_id}; choose one listed in results.jsonl")
    *values, dropped_at = row
    if dropped_at is not None:
        raise UserError(f"the calls of rollout {rollout_id} have left the pool; choose a rollout of a later step")
    return ReplayableRollout(*values)


def finished_rollouts(pool: Pool, run_id: int) -> list[RecordedRollout]:
    """Return a run's finished rollouts in queue order.

    Leaves out those for evaluation, those without an attempt, and those whose completions have left the pool.
    """
    query = (
        select(rollouts.c.id, rollouts.c.group_id, rollouts.c.attempt_id, rollouts.c.reward, rollouts.c.failure)
        .add_columns(MASKED.label("masked"))
        .join_from(rollouts, groups)
        .where(groups.c.run_id == run_id, groups.c.purpose.is_(None), groups.c.dropped_at.is_(None))
        .where(rollouts.c.finished_at.is_not(None), rollouts.c.attempt_id.is_not(None))
        .order_by(groups.c.queue_index, rollouts.c.member)
    )
    with pool.read() as connection:
        rows = connection.execute(query).all()
        by_attempt = of_attempts(connection, [row.attempt_id for row in rows])
    return [
        RecordedRollout(row.id, row.group_id, row.reward, row.failure, row.masked, by_attempt[row.attempt_id])
        for row in rows
    ]


def tokenizers(pool: Pool, attempt_ids: Iterable[int]) -> set[str]:
    """Return the fingerprints of the tokenizers of the proxies that recorded these attempts.

    A proxy without a known fingerprint (proxy/pool/tokenizer_fingerprint.py) is skipped.
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
