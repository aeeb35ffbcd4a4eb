"""What the evaluations of training runs came to: points of curves, and a matrix: a row for each trained policy, a
column for each agent and kind of task.

A point is an agent at tasks of one kind, held out or not, under one version of the policy. Held out are agents and
tasks of which the training run has opened no group to train. A missing reward is missing, and counted. Rollouts that
are masked because they cheated are counted, too, and no part of a mean. Of a rollout that was replaced only the newest
replacement counts.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sqlalchemy import select

from proxy.pool.database import Pool
from proxy.pool.rollouts.masked import MASKED
from proxy.pool.schema import groups, rollouts, tasks
from proxy.pool.training.evaluations import (
    Evaluates,
    Evaluation,
    all_evaluations,
    evaluations,
    is_finished,
    newest_of_chains,
)


class EvaluatedColumn(NamedTuple):
    """What is evaluated."""

    agent: str
    agent_held_out: bool
    tasks_held_out: bool

    @property
    def text(self) -> str:
        agent = f"{self.agent} (held out)" if self.agent_held_out else self.agent
        return agent + (", held-out tasks" if self.tasks_held_out else ", trained tasks")


@dataclass(frozen=True)
class EvaluationPoint:
    """An agent at tasks of one kind under one version."""

    step: int
    version: str
    run: str
    """The run that evaluated."""
    agent: str
    agent_held_out: bool
    tasks_held_out: bool
    rollouts: int
    """Those that have an outcome."""
    masked: int
    """How many of these cheated and are masked."""
    rewards: int
    """How many of the others have a reward."""
    reward: float | None
    """Mean of the rewards. None: there are none."""
    versions: dict[str, int]
    """Names of the weights that sampled, each with the rollouts that it sampled a part of."""

    @property
    def column(self) -> EvaluatedColumn:
        return EvaluatedColumn(self.agent, self.agent_held_out, self.tasks_held_out)

    @property
    def text(self) -> str:
        """The mean with the number of its rewards, and of rollouts that are no part of it."""
        counts = {"missing": self.rollouts - self.masked - self.rewards, "masked": self.masked}
        left_out = [f"{count} {name}" for name, count in counts.items() if count]
        if self.reward is None:
            return f"- ({', '.join(left_out)})"
        return ", ".join([f"{self.reward:.3f} of {self.rewards}", *left_out])


@dataclass(frozen=True)
class MatrixRow:
    """A row of the matrix: one policy, and what it was trained with."""

    run: str
    """The training run."""
    trained: tuple[str, ...]
    """Agents that it was trained with up to this step; none at step 0."""
    step: int
    version: str
    points: Sequence[EvaluationPoint]


def points(pool: Pool, of: Sequence[Evaluation]) -> list[EvaluationPoint]:
    """Return the points of these evaluations of one training run, by step."""
    if not of:
        return []
    training = of[0].of.run_id
    seen, trained = _trained_tasks(pool, training), trained_agents(pool, training)
    found = []
    for each in of:
        cells: dict[EvaluatedColumn, list[Any]] = defaultdict(list)
        for row in _rollouts(pool, each.run_id):
            agent = row.agent or "-"
            cells[EvaluatedColumn(agent, agent not in trained, content_of(row.spec) not in seen)].append(row)
        found += [_point(each, column, rows) for column, rows in sorted(cells.items())]
    return found


def trained_agents(pool: Pool, run_id: int) -> set[str]:
    """Return the agents of which a training run has opened groups to train."""
    query = select(groups.c.agent).where(groups.c.run_id == run_id, groups.c.purpose.is_(None)).distinct()
    with pool.read() as connection:
        return {agent or "-" for agent in connection.scalars(query)}


def matrix(pool: Pool) -> list[MatrixRow]:
    """Return for each training run of a pool that was evaluated its first and its last finished evaluation."""
    rows = []
    for run_id in dict.fromkeys(each.of.run_id for each in all_evaluations(pool)):
        whole = [each for each in evaluations(pool, run_id) if is_finished(pool, each)]
        agents = tuple(sorted(trained_agents(pool, run_id)))
        for each in dict.fromkeys(whole[:1] + whole[-1:]):
            of = each.of
            rows.append(MatrixRow(of.run, agents if of.step else (), of.step, of.version, points(pool, [each])))
    return rows


def point_line(of: Evaluates, found: Sequence[EvaluationPoint]) -> str:
    """Return a line about an evaluation."""
    parts = [f"{point.column.text} {point.text}" for point in found]
    names = sorted({name for point in found for name in point.versions})
    return f"evaluation of step {of.step} ({', '.join(names) or of.version}): {'; '.join(parts) or 'no rollout'}"


def as_json(found: Iterable[EvaluationPoint], rows: Iterable[MatrixRow]) -> dict[str, Any]:
    """Return curves and matrix as JSON has them."""
    return {
        "points": [asdict(point) for point in found],
        "matrix": [
            {
                "run": row.run,
                "trained": list(row.trained),
                "step": row.step,
                "version": row.version,
                "evaluated": [asdict(point) for point in row.points],
            }
            for row in rows
        ],
    }


def content_of(spec: Mapping[str, Any]) -> str:
    """Return what a task asks for, whatever it is called."""
    return json.dumps({key: value for key, value in spec.items() if key not in ("id", "metadata")}, sort_keys=True)


def _rollouts(pool: Pool, run_id: int) -> Sequence[Any]:
    """The rollouts of a run that have ended, without those of groups that another one replaces."""
    columns = (groups.c.agent, tasks.c.spec, rollouts.c.reward, rollouts.c.versions, MASKED.label("masked"))
    query = select(*columns).join_from(rollouts, groups).join(tasks, tasks.c.id == groups.c.task_id)
    ended = query.where(groups.c.id.in_(newest_of_chains([run_id])), rollouts.c.finished_at.is_not(None))
    with pool.read() as connection:
        return connection.execute(ended.order_by(rollouts.c.id)).all()


def _trained_tasks(pool: Pool, run_id: int) -> set[str]:
    query = select(tasks.c.spec).join_from(groups, tasks, tasks.c.id == groups.c.task_id)
    trained = query.where(groups.c.run_id == run_id, groups.c.purpose.is_(None))
    with pool.read() as connection:
        return {content_of(spec) for spec in connection.scalars(trained)}


def _point(evaluation: Evaluation, column: EvaluatedColumn, rows: Sequence[Any]) -> EvaluationPoint:
    rewards = [row.reward for row in rows if row.reward is not None and not row.masked]
    versions = Counter(name for row in rows for name in row.versions or ())
    return EvaluationPoint(
        step=evaluation.of.step,
        version=evaluation.of.version,
        run=evaluation.name,
        agent=column.agent,
        agent_held_out=column.agent_held_out,
        tasks_held_out=column.tasks_held_out,
        rollouts=len(rows),
        masked=sum(row.masked for row in rows),
        rewards=len(rewards),
        reward=sum(rewards) / len(rewards) if rewards else None,
        versions=dict(sorted(versions.items())),
    )
