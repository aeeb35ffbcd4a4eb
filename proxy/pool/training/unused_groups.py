"""Counts the groups that no step takes."""

from sqlalchemy import func, select

from proxy.pool.database import Pool
from proxy.pool.rollouts.runs import current_version
from proxy.pool.schema import groups


def since_last_step(pool: Pool, run_id: int) -> dict[str, int]:
    """Count by reason the groups that became a TOMBSTONE since the run's newest step was published."""
    with pool.read() as connection:
        newest = current_version(connection, run_id)
        query = select(groups.c.reason, func.count()).where(groups.c.run_id == run_id, groups.c.state == "TOMBSTONE")
        if newest is not None:
            query = query.where(groups.c.finished_at > newest.created_at)
        return {reason: count for reason, count in connection.execute(query.group_by(groups.c.reason))}
