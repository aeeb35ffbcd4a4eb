"""The figures of a run, from its pool alone."""

from collections import Counter
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from sqlalchemy import func, select

from proxy.pool.database import Pool
from proxy.pool.inspect.account import account
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import attempts, groups, policy_versions
from proxy.pool.training.steps import metrics
from trainer.config.batch import BatchConfig

LAST = 5
"""Steps at a run's beginning and end over which rewards are averaged."""


def run_figures(pool: Pool, name: str, batch: BatchConfig) -> dict[str, Any]:
    """Return what a run did, from the opening of its first group to the push of its last step."""
    run_id = find_run(pool, name).id
    steps = metrics(pool, run_id)[1:]
    with pool.read() as connection:
        began = connection.scalar(select(func.min(groups.c.created_at)).where(groups.c.run_id == run_id))
        pushed = select(func.max(policy_versions.c.pushed_at)).where(policy_versions.c.run_id == run_id)
        ended = connection.scalar(pushed)
        opened = connection.scalar(select(func.count()).where(groups.c.run_id == run_id))
        times = (attempts.c.opened_at, attempts.c.closed_at, attempts.c.timings)
        rows = connection.execute(select(*times).where(attempts.c.run_id == run_id)).all()
    assert began is not None and ended is not None
    seconds = ended - began
    agents = [row.timings["agent"] for row in rows if row.timings and "agent" in row.timings]
    rewards = [step.get("reward_mean") for step in steps]
    working = [(step["seconds"], sum(step["seconds"].values())) for step in steps]
    by_lag = sum((Counter(step["staleness_tokens"]) for step in steps), Counter[str]())
    return {
        "steps": len(steps),
        "seconds": seconds,
        "seconds_per_step": seconds / len(steps),
        "trained_groups_per_second": sum(step["groups"] for step in steps) / seconds,
        "reward_first": mean_reward(rewards[:LAST]),
        "reward_last": mean_reward(rewards[-LAST:]),
        "reward_by_step": rewards,
        "lag_bound": batch.lag_bound,
        "lag_max": max(step["staleness_max"] for step in steps),
        "lag_mean": fmean(step["staleness_mean"] for step in steps),
        "trained_tokens_by_lag": dict(sorted(by_lag.items())),
        "groups_opened": opened,
        "trainer_idle": 1 - sum(spent - parts["wait"] for parts, spent in working) / seconds,
        "step_seconds": {part: fmean(step["seconds"][part] for step in steps) for part in steps[0]["seconds"]},
        "agents_at_once": sum(min(row.closed_at or ended, ended) - min(row.opened_at, ended) for row in rows) / seconds,
        "agent_seconds_median": median(agents),
        "agent_seconds_max": max(agents),
        "account": places(pool, run_id),
    }


def mean_reward(rewards: list[float | None]) -> float | None:
    """Return the mean of the rewards of steps. None: no step has one."""
    known = [reward for reward in rewards if reward is not None]
    return fmean(known) if known else None


def places(pool: Pool, run_id: int) -> dict[str, Any]:
    """Return the account of a run: groups, rollouts and tokens by place."""
    now = account(pool, run_id)
    return asdict(now) | {"unaccounted": now.unaccounted}


def compared(sync: dict[str, Any], windowed: dict[str, Any]) -> dict[str, Any]:
    """Compare the two runs: speed in steps per second, and the rewards that they end with."""
    return {
        "async_vs_sync": sync["seconds_per_step"] / windowed["seconds_per_step"],
        "reward_sync": sync["reward_last"],
        "reward_async": windowed["reward_last"],
    }
