"""Rewards beside those that steps publish: evaluation points at the weights that made them, and rewards by agent.

Taken from the newest finished groups alone, so older points of a long run are missing.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.rollouts.runs import version_of
from proxy.pool.schema import attempts, groups, policy_versions, rollouts, runs

NEWEST_GROUPS = 512
"""Finished groups of the run that are looked at."""
EVALUATIONS = 8
"""The newest runs for evaluation that are looked at."""
NEWEST_OF_EVALUATION = 64
"""Finished groups of each of them."""
HELD_OUT = "held out"


@dataclass(frozen=True)
class RewardPoint:
    """A mean reward at a step."""

    step: int
    reward: float
    rewards: int


@dataclass(frozen=True)
class RunRewards:
    """Rewards of a run beside those that its steps publish."""

    evaluations: dict[str, list[RewardPoint]]
    """By who evaluated: the run's own groups that are held out, or a run for evaluation. The step is that of the newest
    weights that sampled a rollout."""
    agents: dict[str, list[RewardPoint]]
    """Of the groups that steps took, by agent; empty where there is one agent."""
    groups: int
    """Finished groups of the run that were looked at."""


def run_rewards(pool: Pool, run_id: int) -> RunRewards:
    """Return the evaluation points of a run, and its rewards by agent."""
    others = select(runs.c.id, runs.c.name).where(runs.c.purpose == "eval", runs.c.id != run_id)
    with snapshot(pool) as connection:
        own = connection.execute(_members(run_id, NEWEST_GROUPS)).all()
        evaluations = {HELD_OUT: [row for row in own if row.purpose == "eval"]}
        for other in connection.execute(others.order_by(runs.c.id.desc()).limit(EVALUATIONS)).all():
            evaluations[other.name] = list(connection.execute(_members(other.id, NEWEST_OF_EVALUATION)))
        steps = _steps(connection, run_id, (row for rows in evaluations.values() for row in rows))
    points = {
        name: _points((steps.get(_newest(row)), row.reward) for row in rows) for name, rows in evaluations.items()
    }
    agents = defaultdict(list)
    for row in own:
        if row.step is not None:
            agents[str(row.agent)].append((row.step, row.reward))
    by_agent = {name: _points(pairs) for name, pairs in agents.items()} if len(agents) > 1 else {}
    looked_at = len({row.group_id for row in own})
    return RunRewards({name: some for name, some in points.items() if some}, by_agent, looked_at)


def _members(run_id: int, newest: int) -> Any:
    some = (
        select(groups.c.id, groups.c.step, groups.c.purpose, groups.c.agent)
        .where(groups.c.run_id == run_id, groups.c.finished_at.is_not(None))
        .order_by(groups.c.finished_at.desc(), groups.c.id.desc())
        .limit(newest)
        .subquery()
    )
    columns = (rollouts.c.group_id, rollouts.c.reward, rollouts.c.versions, some.c.step, some.c.purpose)
    return (
        select(*columns, func.coalesce(some.c.agent, attempts.c.agent).label("agent"))
        .join_from(some, rollouts, rollouts.c.group_id == some.c.id)
        .outerjoin(attempts, attempts.c.id == rollouts.c.attempt_id)
    )


def _newest(row: Row[Any]) -> int:
    """Return the id of the newest weights that sampled a rollout; 0: not known."""
    return max((version_of(str(name)) or 0 for name in row.versions or ()), default=0)


def _steps(connection: Connection, run_id: int, rows: Iterable[Row[Any]]) -> dict[int, int]:
    """Return the step of each of the run's versions that sampled one of these rollouts."""
    ids = sorted({_newest(row) for row in rows} - {0})
    query = select(policy_versions.c.id, policy_versions.c.step).where(policy_versions.c.id.in_(ids))
    return {row.id: row.step for row in connection.execute(query.where(policy_versions.c.run_id == run_id))}


def _points(pairs: Iterable[tuple[int | None, float | None]]) -> list[RewardPoint]:
    """Return the mean reward at each step; rollouts without a reward, or of weights of other runs, do not count."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for step, reward in pairs:
        if step is not None and reward is not None:
            by_step[step].append(reward)
    return [RewardPoint(step, _mean(values), len(values)) for step, values in sorted(by_step.items())]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
