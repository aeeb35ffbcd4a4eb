"""Evaluations of a run as points: the mean reward at the weights that were evaluated.

Points of evaluations that a training run asked for are means by agent, whatever the tasks were; with these apart,
`proxy/pool/inspect/evaluated.py` has them. Those of other runs for evaluation, and of own held-out groups, stand
at the step of the newest weights that sampled a rollout.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.rollouts.masked import MASKED
from proxy.pool.rollouts.runs import version_of
from proxy.pool.schema import attempts, groups, policy_versions, rollouts, runs
from proxy.pool.training.evaluations import Evaluates, newest_of_chains, what_it_evaluates

NEWEST_GROUPS = 4096
"""Finished groups of the run among which held-out ones are looked for."""
NEWEST_EVALUATIONS = 256
"""The pool's newest runs for evaluation that are looked at."""
NEWEST_OTHERS = 8
"""How many of these are evaluations that no training run asked for."""
NEWEST_OF_OTHER = 64
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
    """Rewards of a run that its steps do not publish."""

    evaluations: dict[str, list[RewardPoint]]
    """Points by step, per agent, the run's own held-out groups, or other run for evaluation."""
    older: bool
    """Whether there are older evaluations, or older finished groups, that were not looked at."""


def run_rewards(pool: Pool, run_id: int) -> RunRewards:
    """Return the evaluation points of a run."""
    of_pool = select(runs.c.id, runs.c.name, runs.c.config).where(runs.c.purpose == "eval", runs.c.id != run_id)
    with snapshot(pool) as connection:
        newest = connection.execute(of_pool.order_by(runs.c.id.desc()).limit(NEWEST_EVALUATIONS + 1)).all()
        asked_for = {row.id: what_it_evaluates(row.config) for row in newest[:NEWEST_EVALUATIONS]}
        own = {id: of for id, of in asked_for.items() if of is not None and of.run_id == run_id}
        others = [row for row in newest if row.id in asked_for and asked_for[row.id] is None][:NEWEST_OTHERS]
        finished = connection.execute(_newest_groups(run_id).limit(NEWEST_GROUPS + 1)).all()
        held_out = [row.id for row in finished[:NEWEST_GROUPS] if row.purpose == "eval"]
        members = {HELD_OUT: connection.execute(_members(held_out)).all()}
        for row in others:
            of_other = _newest_groups(row.id).limit(NEWEST_OF_OTHER).subquery()
            members[row.name] = connection.execute(_members(select(of_other.c.id))).all()
        steps = _steps(connection, run_id, (row for rows in members.values() for row in rows))
        points = _by_agent(connection, run_id, own)
    points |= {name: _points((steps.get(_newest(row)), row.reward) for row in rows) for name, rows in members.items()}
    older = len(newest) > NEWEST_EVALUATIONS or (bool(held_out) and len(finished) > NEWEST_GROUPS)
    return RunRewards({name: some for name, some in points.items() if some}, older)


def _by_agent(connection: Connection, run_id: int, own: Mapping[int, Evaluates]) -> dict[str, list[RewardPoint]]:
    """Return the means of evaluations that this run asked for, without those of weights that a rollback retired."""
    if not own:  # SQLite walks all versions to find none of an empty list
        return {}
    current = _current(connection, run_id, {version_of(of.version) or 0 for of in own.values()})
    ids = sorted(id for id, of in own.items() if version_of(of.version) in current)
    agent = func.coalesce(groups.c.agent, attempts.c.agent)
    query = (
        select(groups.c.run_id, agent.label("agent"), func.avg(rollouts.c.reward).label("reward"))
        .add_columns(func.count(rollouts.c.reward).label("rewards"))
        .join_from(groups, rollouts, rollouts.c.group_id == groups.c.id)
        .outerjoin(attempts, attempts.c.id == rollouts.c.attempt_id)
        .where(groups.c.id.in_(newest_of_chains(ids)), rollouts.c.reward.is_not(None), ~MASKED)
        .group_by(groups.c.run_id, agent)
    )
    points = defaultdict(list)
    for row in connection.execute(query):
        points[f"{row.agent} (evaluated)"].append(RewardPoint(own[row.run_id].step, row.reward, row.rewards))
    return {name: sorted(some, key=lambda point: point.step) for name, some in sorted(points.items())}


def _current(connection: Connection, run_id: int, ids: Collection[int]) -> set[int]:
    """Return those of these versions of a run that no rollback has retired."""
    kept = select(policy_versions.c.id).where(policy_versions.c.id.in_(ids), policy_versions.c.retired_at.is_(None))
    return set(connection.scalars(kept.where(policy_versions.c.run_id == run_id)))


def _newest_groups(run_id: int) -> Any:
    """Select the finished groups of a run, the newest first."""
    own = select(groups.c.id, groups.c.purpose).where(groups.c.run_id == run_id, groups.c.finished_at.is_not(None))
    return own.order_by(groups.c.finished_at.desc(), groups.c.id.desc())


def _members(ids: Any) -> Any:
    """Select the rollouts of these groups."""
    columns = (rollouts.c.group_id, rollouts.c.reward, rollouts.c.versions)
    return select(*columns).where(rollouts.c.group_id.in_(ids))


def _newest(row: Row[Any]) -> int:
    """Return the id of the newest weights that sampled a rollout; 0: not known."""
    return max((version_of(str(name)) or 0 for name in row.versions or ()), default=0)


def _steps(connection: Connection, run_id: int, rows: Iterable[Row[Any]]) -> dict[int, int]:
    """Return the step of each of the run's versions that sampled one of these rollouts."""
    ids = sorted({_newest(row) for row in rows} - {0})
    if not ids:
        return {}
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
