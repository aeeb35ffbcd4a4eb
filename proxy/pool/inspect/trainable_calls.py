"""How many of a run's calls can train, by client, and why the others cannot.

A client is an agent as the run names it. Left out: what a train step decides (staleness, equal rewards, `batch.labels`
other than the default, single completions that `batch.function` leaves out).
"""

from collections import Counter
from dataclasses import dataclass, field

from sqlalchemy import case, func, select

from proxy.pool.database import Pool
from proxy.pool.read.why_untrained import Surroundings, group_untrained, why_untrained
from proxy.pool.rollouts.attempts import PURPOSE
from proxy.pool.rollouts.masked import masked_as_hacked
from proxy.pool.schema import TOKENS, attempts, completions, groups, rollouts, runs
from proxy.pool.untrained import Untrained


@dataclass
class ClientCalls:
    """The calls of one client in a run."""

    calls: int = 0
    tokens: int = 0
    """Sampled tokens of all calls."""
    retried_tokens: int = 0
    """Those of attempts that were run again."""
    trainable: int = 0
    """Calls that can train."""
    untrained: Counter[Untrained] = field(default_factory=Counter)
    """The other calls, by reason."""


def trainable_calls(pool: Pool, run_id: int) -> dict[str, ClientCalls]:
    """Count the calls of a run by client; a client without calls is left out."""
    newest = select(func.max(attempts.c.id)).where(attempts.c.rollout_id == rollouts.c.id).correlate(rollouts)
    deciding = func.coalesce(rollouts.c.attempt_id, newest.scalar_subquery())
    ended_without_outcome = rollouts.c.finished_at.is_(None) & attempts.c.closed_at.is_not(None)
    columns = (
        func.coalesce(groups.c.agent, attempts.c.agent).label("client"),
        case((ended_without_outcome | (attempts.c.id != deciding), True), else_=False).label("retried"),
        completions.c.untrainable,
        completions.c.label,
        (rollouts.c.finished_at.is_not(None) & rollouts.c.reward.is_(None)).label("without_reward"),
        rollouts.c.failure,
        rollouts.c.hacked,
        rollouts.c.set_aside,
        groups.c.reason,
        PURPOSE,
    )
    inner = (
        select(*columns, TOKENS.label("tokens"))
        .join_from(completions, attempts)
        .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .join(runs, runs.c.id == groups.c.run_id)
        .where(groups.c.run_id == run_id)
        .subquery()
    )
    kinds = [inner.c[column.name] for column in columns]
    query = select(*kinds, func.count().label("calls"), func.sum(inner.c.tokens).label("tokens")).group_by(*kinds)
    clients: dict[str, ClientCalls] = {}
    with pool.read() as connection:
        for row in connection.execute(query.order_by(*kinds)):
            client = clients.setdefault(row.client, ClientCalls())
            around = Surroundings(
                retried=row.retried,
                without_reward=row.without_reward,
                failure=row.failure,
                hacked=masked_as_hacked(row.hacked, None),
                set_aside=row.set_aside,
                group=group_untrained(row.purpose, row.reason, None),
            )
            reason = why_untrained(Untrained.from_columns(row.untrainable, None), row.label, around)
            client.calls += row.calls
            client.tokens += row.tokens
            client.retried_tokens += row.tokens if row.retried else 0
            if reason is None:
                client.trainable += row.calls
            else:
                client.untrained[reason] += row.calls
    return clients
