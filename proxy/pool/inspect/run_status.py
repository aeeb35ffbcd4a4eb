"""The status of a run, from its rows alone, so that it can be shown on any machine."""

from collections import Counter
from dataclasses import dataclass, field

import msgspec
from sqlalchemy import func, select

from proxy.pool.database import Pool
from proxy.pool.processes.owners import PoolProcess, database_time, is_alive, this_process
from proxy.pool.schema import SAMPLED_TOKENS, attempts, completions, groups, rollouts, runs

NEWEST_COMPLETION = select(func.max(completions.c.id))


@dataclass
class AgentProgress:
    """Counts of the rollouts of one agent."""

    rollouts: int = 0
    finished: int = 0
    rewards: int = 0
    reward_sum: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    hacked: int = 0
    """Rollouts that cheated (harness/integrity), whatever becomes of them."""
    counted: int = 0
    """Finished rollouts whose calls and tokens are known."""
    calls: int = 0
    tokens: int = 0
    """Calls and sampled tokens of the final attempts of these."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at one moment."""

    agents: dict[str, AgentProgress]
    """Progress per agent's name; "-" where the run has only one."""
    open_attempts: int
    owner: PoolProcess | None
    """The harness that works on it; None: none does, or it is dead."""
    silent_seconds: float
    """Seconds since the last heartbeat of the owner."""


@dataclass(frozen=True)
class Traffic:
    """Model calls of a run after a completion."""

    calls: int
    tokens: int
    last: int
    """Id of the newest completion of the pool, to ask for the calls after it next time."""


def run_status(pool: Pool, run_id: int) -> RunStatus:
    """Read the status of a run."""
    kinds = (groups.c.agent, rollouts.c.failure, rollouts.c.finished_at.is_not(None).label("finished"))
    sums = (
        func.count(),
        func.count(rollouts.c.reward),
        func.coalesce(func.sum(rollouts.c.reward), 0.0),
        func.count(rollouts.c.hacked),
        func.count(rollouts.c.sampled_tokens),
        func.coalesce(func.sum(rollouts.c.completions), 0),
        func.coalesce(func.sum(rollouts.c.sampled_tokens), 0),
    )
    query = select(*kinds, *sums).join_from(rollouts, groups).where(groups.c.run_id == run_id).group_by(*kinds)
    is_open = (attempts.c.run_id == run_id) & attempts.c.closed_at.is_(None)
    agents: dict[str, AgentProgress] = {}
    with pool.read() as connection:
        for agent, failure, finished, count, rewards, reward_sum, hacked, *lengths in connection.execute(query):
            part = agents.setdefault(agent or "-", AgentProgress())
            part.rollouts += count
            part.finished += count if finished else 0
            part.rewards += rewards
            part.reward_sum += reward_sum
            part.hacked += hacked
            counted, calls, tokens = lengths
            part.counted, part.calls, part.tokens = part.counted + counted, part.calls + calls, part.tokens + tokens
            if failure is not None:
                part.failures[failure] += count
        open_attempts = connection.scalar(select(func.count()).where(is_open)) or 0
        owner, seen_at = connection.execute(select(runs.c.owner, runs.c.owner_seen_at).where(runs.c.id == run_id)).one()
        silent = database_time(connection, pool) - seen_at if owner is not None else 0.0
    holder = None if owner is None else msgspec.convert(owner, PoolProcess)
    if holder is not None and not is_alive(holder, this_process(), silent):
        holder = None
    return RunStatus(agents, open_attempts, holder, silent)


def traffic(pool: Pool, run_id: int, after: int | None) -> Traffic:
    """Count the run's calls after this completion of the pool; none when `after` is None."""
    with pool.read() as connection:
        last = connection.scalar(NEWEST_COMPLETION) or 0
        if after is None or after == last:
            return Traffic(0, 0, last)
        # As a subquery, because SQLite would read all attempts of the run for a join.
        owner = select(attempts.c.run_id).where(attempts.c.id == completions.c.attempt_id).scalar_subquery()
        query = select(func.count(), func.coalesce(func.sum(SAMPLED_TOKENS), 0)).select_from(completions)
        new = (completions.c.id > after) & (completions.c.id <= last) & (owner == run_id)
        calls, tokens = connection.execute(query.where(new)).one()
    return Traffic(calls, tokens, last)
