"""Counts the groups that no step takes, and the attempts that fail."""

from sqlalchemy import func, select

from proxy.pool.database import Pool
from proxy.pool.rollouts.failures import FAILURES
from proxy.pool.rollouts.runs import current_version
from proxy.pool.schema import attempts, groups, rollouts


def since_last_step(pool: Pool, run_id: int) -> dict[str, int]:
    """Count by reason the groups that became a TOMBSTONE since the run's newest step was published."""
    with pool.read() as connection:
        newest = current_version(connection, run_id)
        query = select(groups.c.reason, func.count()).where(groups.c.run_id == run_id, groups.c.state == "TOMBSTONE")
        if newest is not None:
            query = query.where(groups.c.finished_at > newest.created_at)
        return {reason: count for reason, count in connection.execute(query.group_by(groups.c.reason))}


NO_ABORT = ("redundant", "filtered", "called_off", "interrupted")
"""Failures of attempts that were called off, or that the end of their harness cut off."""


def abort_share(pool: Pool, run_id: int) -> float | None:
    """Return the share of attempts that failed by no fault of the policy, in groups that finished since the last step.

    None where none finished.
    """
    aborts = [kind for kind, one in FAILURES.items() if one.treatment != "policy" and kind not in NO_ABORT]
    with pool.read() as connection:
        newest = current_version(connection, run_id)
        failed = func.count().filter(attempts.c.failure.in_(aborts))
        query = select(failed, func.count()).join_from(groups, rollouts, rollouts.c.group_id == groups.c.id)
        query = query.join(attempts, attempts.c.rollout_id == rollouts.c.id).where(groups.c.run_id == run_id)
        since = groups.c.finished_at > (0.0 if newest is None else newest.created_at)
        failures, ended = connection.execute(query.where(since, attempts.c.closed_at.is_not(None))).one()
    return failures / ended if ended else None
