"""What warm starts (`trainer sft`) and train steps ([[imitation]]) have imitated: tokens of each completion, counted
once, in the account of the run that recorded it.
"""

from collections.abc import Mapping

from sqlalchemy import Connection, func, insert, select

from proxy.pool.completions.store import IDS_PER_QUERY
from proxy.pool.database import Pool, retried
from proxy.pool.schema import attempts, completions, groups, imitated, rollouts
from proxy.pool.training.fates import Tally


@retried
def keep_imitated(pool: Pool, tokens: Mapping[int, int]) -> None:
    """Store how many tokens of each completion were learned."""
    with pool.write() as connection:
        write_imitated(connection, tokens)


def write_imitated(connection: Connection, tokens: Mapping[int, int]) -> None:
    """Store how many tokens of each completion were learned. Those that are stored keep their number."""
    ids = sorted(tokens)
    query = (
        select(completions.c.id, attempts.c.run_id, attempts.c.rollout_id)
        .join_from(completions, attempts)
        .outerjoin(imitated, imitated.c.completion_id == completions.c.id)
        .where(attempts.c.rollout_id.is_not(None), imitated.c.completion_id.is_(None))
    )
    for start in range(0, len(ids), IDS_PER_QUERY):
        rows = connection.execute(query.where(completions.c.id.in_(ids[start : start + IDS_PER_QUERY]))).all()
        values = [
            {"completion_id": row.id, "run_id": row.run_id, "rollout_id": row.rollout_id, "tokens": tokens[row.id]}
            for row in rows
        ]
        if values:
            connection.execute(insert(imitated), values)


def imitation(connection: Connection, run_id: int) -> Tally:
    """Return how many tokens of a run were imitated."""
    counts = (func.count(rollouts.c.group_id.distinct()), func.count(rollouts.c.id.distinct()))
    query = (
        select(*counts, func.coalesce(func.sum(imitated.c.tokens), 0))
        .join_from(imitated, rollouts, rollouts.c.id == imitated.c.rollout_id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .where(imitated.c.run_id == run_id)
    )
    return Tally(*map(int, connection.execute(query).one()))
