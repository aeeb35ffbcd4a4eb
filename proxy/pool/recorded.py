"""Reading finished rollouts back with their completions, whatever became of their group: for imitation and checks.

Left out: groups that were held out for evaluation.
"""

from dataclasses import dataclass

from sqlalchemy import select

from proxy.pool.completions import of_attempts
from proxy.pool.database import Pool
from proxy.pool.records import Completion
from proxy.pool.schema import groups, rollouts


@dataclass(frozen=True)
class Recorded:
    """A finished rollout and the completions of its final attempt. `reward` None is a missing one."""

    rollout_id: int
    group_id: int
    reward: float | None
    failure: str | None
    completions: list[Completion]


def finished_rollouts(pool: Pool, run_id: int) -> list[Recorded]:
    """The finished rollouts of a run that have an attempt, in queue order."""
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
    return [Recorded(row.id, row.group_id, row.reward, row.failure, completions[row.attempt_id]) for row in rows]
