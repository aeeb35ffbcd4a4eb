"""Evaluations of a run as points: the mean reward at the weights that were evaluated, in all, by agent and by domain.

Points of evaluations that a training run asked for are apart by the kind of their tasks (evaluated.py) and stand at the
step that they evaluate. Those of other runs for evaluation, and of own held-out groups, stand at the step of the newest
weights that sampled a rollout.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row, func, select

from proxy.pool.browse.evaluated import current, evaluated_cells, newest_evaluations
from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.rollouts.runs import version_of
from proxy.pool.schema import attempts, groups, policy_versions, rollouts, tasks
from proxy.pool.training.evaluations import Evaluates

NEWEST_GROUPS = 4096
"""Finished groups of the run among which held-out ones are looked for."""
NEWEST_OTHERS = 8
"""How many of the newest runs for evaluation that no training run asked for are looked at."""
NEWEST_OF_OTHER = 256
"""Finished groups of each of them that count."""
HELD_OUT = "held out"

Part = Literal["all", "agent", "domain"]
PARTS: tuple[Part, ...] = ("all", "agent", "domain")


@dataclass(frozen=True)
class RewardPoint:
    """A mean reward at a step."""

    step: int
    reward: float
    rewards: int


@dataclass(frozen=True)
class RunRewards:
    """Rewards of a run that its steps do not publish."""

    evaluations: dict[Part, dict[str, list[RewardPoint]]]
    """In all, by agent and by domain: the points of what was evaluated, by step."""
    older: bool
    """Whether there are older evaluations, or older finished groups, that were not looked at."""


@dataclass(frozen=True)
class _Rewards:
    """Some rewards at one step."""

    source: str
    """How they came about: evaluated at a kind of task, in own held-out groups, or in another run for evaluation."""
    agent: str
    domain: str
    step: int
    rewards: int
    total: float

    def label(self, part: Part) -> str:
        named = {"all": "", "agent": self.agent, "domain": self.domain}[part]
        return f"{named} ({self.source})" if named else self.source


def run_rewards(pool: Pool, run_id: int) -> RunRewards:
    """Return the evaluation points of a run."""
    with snapshot(pool) as connection:
        newest, older = newest_evaluations(connection)
        own = {id: of for id, (_, of) in newest.items() if of is not None and of.run_id == run_id}
        others = {id: name for id, (name, of) in newest.items() if of is None and id != run_id}
        finished = connection.execute(_newest_groups(run_id).limit(NEWEST_GROUPS + 1)).all()
        held_out = [row.id for row in finished[:NEWEST_GROUPS] if row.purpose == "eval"]
        members = {HELD_OUT: connection.execute(_members(held_out)).all()} if held_out else {}
        for id, name in list(others.items())[:NEWEST_OTHERS]:
            of_other = connection.execute(_newest_groups(id).limit(NEWEST_OF_OTHER + 1)).all()
            older = older or len(of_other) > NEWEST_OF_OTHER
            members[name] = connection.execute(_members([row.id for row in of_other[:NEWEST_OF_OTHER]])).all()
        steps = _steps(connection, run_id, (row for rows in members.values() for row in rows))
        found = [*_evaluated(connection, run_id, own), *_sampled(members, steps)]
    points = {part: _points((each.label(part), each) for each in found) for part in PARTS}
    return RunRewards(points, older or (bool(held_out) and len(finished) > NEWEST_GROUPS))


def _evaluated(connection: Connection, run_id: int, own: Mapping[int, Evaluates]) -> Iterator[_Rewards]:
    """Yield the rewards of evaluations that this run asked for, without those of weights that a rollback retired."""
    kept = current(connection, run_id, own)
    for cell in evaluated_cells(connection, run_id, kept):
        source = f"evaluated, {cell.tasks}" if cell.tasks else "evaluated"
        yield _Rewards(source, cell.agent, cell.domain, kept[cell.run_id].step, cell.rewards, cell.total)


def _sampled(members: Mapping[str, Sequence[Row[Any]]], steps: Mapping[int, int]) -> Iterator[_Rewards]:
    """Yield the rewards of these rollouts. Those without one, or of weights of other runs, do not count."""
    for source, rows in members.items():
        for row in rows:
            step = steps.get(_newest(row))
            if step is not None and row.reward is not None:
                yield _Rewards(source, row.agent, row.domain, step, 1, row.reward)


def _newest_groups(run_id: int) -> Any:
    """Select the finished groups of a run, the newest first."""
    own = select(groups.c.id, groups.c.purpose).where(groups.c.run_id == run_id, groups.c.finished_at.is_not(None))
    return own.order_by(groups.c.finished_at.desc(), groups.c.id.desc())


def _members(ids: Any) -> Any:
    """Select the rollouts of these groups."""
    agent = func.coalesce(groups.c.agent, attempts.c.agent, "-").label("agent")
    return (
        select(rollouts.c.reward, rollouts.c.versions, tasks.c.domain, agent)
        .join_from(groups, rollouts, rollouts.c.group_id == groups.c.id)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .outerjoin(attempts, attempts.c.id == rollouts.c.attempt_id)
        .where(groups.c.id.in_(ids))
    )


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


def _points(labelled: Iterable[tuple[str, _Rewards]]) -> dict[str, list[RewardPoint]]:
    """Return the mean reward of each label at each step."""
    sums: dict[str, dict[int, tuple[int, float]]] = defaultdict(dict)
    for label, each in labelled:
        count, total = sums[label].get(each.step, (0, 0.0))
        if each.rewards:
            sums[label][each.step] = (count + each.rewards, total + each.total)
    return {
        label: [RewardPoint(step, total / count, count) for step, (count, total) in sorted(of.items())]
        for label, of in sorted(sums.items())
        if of
    }
