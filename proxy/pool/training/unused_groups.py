"""Counts the groups that no step takes, the rollouts that wait for one, and the attempts that fail."""

from sqlalchemy import ColumnElement, Connection, func, select

from proxy.pool.database import Pool
from proxy.pool.rollouts.failures import FAILURES
from proxy.pool.rollouts.runs import current_version, waiting
from proxy.pool.schema import attempts, groups, policy_versions, rollouts
from proxy.pool.training.steps import Version


def since_last_step(pool: Pool, run_id: int) -> dict[str, int]:
    """Count by reason the groups that became a TOMBSTONE since the run's newest step was published."""
    with pool.read() as connection:
        newest = current_version(connection, run_id)
        return _dropped(connection, run_id, groups.c.finished_at > (0.0 if newest is None else newest.created_at))


def before_step(pool: Pool, version: Version) -> dict[str, int]:
    """Count by reason the groups that became a TOMBSTONE after the step before was published, and before this one."""
    earlier = (policy_versions.c.run_id == version.run_id) & (policy_versions.c.step < version.step)
    last = select(func.max(policy_versions.c.created_at)).where(earlier, policy_versions.c.retired_at.is_(None))
    with pool.read() as connection:
        begin = connection.scalar(last) or 0.0
        within = (groups.c.finished_at > begin) & (groups.c.finished_at <= version.created_at)
        return _dropped(connection, version.run_id, within)


def waiting_rollouts(pool: Pool, run_id: int) -> tuple[int, int]:
    """Count the rollouts of the groups that wait for a step: those that have ended, and all."""
    with pool.read() as connection:
        query = select(func.count(rollouts.c.finished_at), func.count()).join_from(groups, rollouts)
        ended, opened = connection.execute(query.where(waiting(run_id))).one()
    return ended, opened


def _dropped(connection: Connection, run_id: int, when: ColumnElement[bool]) -> dict[str, int]:
    mine = (groups.c.run_id == run_id) & (groups.c.state == "TOMBSTONE") & when
    query = select(groups.c.reason, func.count()).where(mine).group_by(groups.c.reason)
    return {reason: count for reason, count in connection.execute(query)}


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
