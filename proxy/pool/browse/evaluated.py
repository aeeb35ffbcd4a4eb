"""Evaluations that training runs asked for, added up by the database: by agent, domain and kind of task; the matrix.

A task is trained where the training run has opened a group to train on one that asks for the same, else held out. Of a
training run with very many tasks some are compared: those with the names of the evaluated ones, and the first
MOST_TASKS. What has no match among these is of no known kind. An agent is held out where none of the training run's
newest groups has it. `harness evaluations` compares with all of them (proxy/pool/inspect/evaluated.py).
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, case, func, select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.inspect.evaluated import content_of
from proxy.pool.rollouts.masked import MASKED
from proxy.pool.rollouts.runs import version_of
from proxy.pool.schema import attempts, groups, policy_versions, rollouts, runs, tasks
from proxy.pool.training.evaluations import Evaluates, Evaluation, is_finished, newest_of_chains, what_it_evaluates

NEWEST_EVALUATIONS = 256
"""The pool's newest runs for evaluation that are looked at."""
MOST_TASKS = 4096
"""Tasks of a training run, and of its evaluations, that are compared."""
TASKS_PER_QUERY = 64
NEWEST_TRAINED = 4096
"""Groups of a training run whose agents count as trained."""
MOST_POLICIES = 8
"""Training runs of the matrix."""
UNFINISHED = 3
"""Evaluations at either end of a training run that may be unfinished before the matrix leaves that end out."""


@dataclass(frozen=True)
class EvaluatedCell:
    """The rollouts of one evaluation with one agent, at tasks of one domain and kind, that have ended."""

    run_id: int
    """The run that evaluated."""
    agent: str
    named: str | None
    """The agent's name in the run; None: the run has one agent."""
    domain: str
    tasks: str
    """held-out tasks | trained tasks; "": not known."""
    rollouts: int
    masked: int
    """Of these, those that cheated and are masked."""
    rewards: int
    """Of the others, those with a reward."""
    total: float
    """Sum of these rewards."""


@dataclass(frozen=True)
class MatrixCell:
    """An agent at tasks of one kind, under one policy."""

    agent: str
    agent_held_out: bool
    tasks: str
    rollouts: int
    masked: int
    rewards: int
    reward: float | None
    """Mean of the rewards. None: there are none."""


@dataclass(frozen=True)
class MatrixLine:
    """One policy, and what it was trained with."""

    run: str
    trained: list[str]
    """Agents that it was trained with up to this step; none at step 0."""
    step: int
    version: str
    evaluation: str
    """The run that evaluated it."""
    cells: list[MatrixCell]


@dataclass(frozen=True)
class EvaluationMatrix:
    """Policies before and after their training, at all agents and kinds of tasks."""

    lines: list[MatrixLine]
    older: bool
    """Whether the pool has older evaluations, which were not looked at."""


def newest_evaluations(connection: Connection) -> tuple[dict[int, tuple[str, Evaluates | None]], bool]:
    """Return name and purpose of the pool's newest runs for evaluation by id, newest first; whether there are older."""
    query = select(runs.c.id, runs.c.name, runs.c.config).where(runs.c.purpose == "eval").order_by(runs.c.id.desc())
    rows = connection.execute(query.limit(NEWEST_EVALUATIONS + 1)).all()
    found = {row.id: (row.name, what_it_evaluates(row.config)) for row in rows[:NEWEST_EVALUATIONS]}
    return found, len(rows) > NEWEST_EVALUATIONS


def current(connection: Connection, run_id: int, of: Mapping[int, Evaluates]) -> dict[int, Evaluates]:
    """Return those of a training run's evaluations whose version no rollback has retired, by step."""
    if not of:  # SQLite walks all versions to find none of an empty list
        return {}
    ids = {version_of(each.version) or 0 for each in of.values()}
    mine = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None)
    kept = set(connection.scalars(select(policy_versions.c.id).where(policy_versions.c.id.in_(ids), mine)))
    some = [(id, each) for id, each in of.items() if version_of(each.version) in kept]
    return dict(sorted(some, key=lambda pair: (pair[1].step, pair[0])))


def evaluated_cells(connection: Connection, run_id: int, ids: Collection[int]) -> list[EvaluatedCell]:
    """Add up these evaluations of a training run. Of a rollout that was replaced only the newest one counts."""
    if not ids:
        return []
    ids = sorted(ids)
    names, whole = _trained_tasks(connection, run_id, ids)
    counts, reward = ~MASKED, rollouts.c.reward
    each = (
        select(groups.c.run_id, groups.c.agent.label("named"), tasks.c.domain)
        .add_columns(func.coalesce(groups.c.agent, attempts.c.agent, "-").label("agent"))
        .add_columns(case((tasks.c.name.in_(names), 1), else_=0).label("trained"))
        .add_columns(case((MASKED, 1), else_=0).label("masked"), case((counts, reward)).label("reward"))
        .join_from(groups, rollouts, rollouts.c.group_id == groups.c.id)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .outerjoin(attempts, attempts.c.id == rollouts.c.attempt_id)
        .where(groups.c.id.in_(newest_of_chains(ids)), rollouts.c.finished_at.is_not(None))
        .subquery()
    )
    keys = (each.c.run_id, each.c.agent, each.c.named, each.c.domain, each.c.trained)
    sums = (func.sum(each.c.masked).label("masked"), func.count(each.c.reward).label("rewards"))
    query = select(*keys, *sums, func.count().label("rollouts"), func.sum(each.c.reward).label("total"))
    return [
        EvaluatedCell(
            run_id=row.run_id,
            agent=row.agent,
            named=row.named,
            domain=row.domain,
            tasks="trained tasks" if row.trained else "held-out tasks" if whole else "",
            rollouts=row.rollouts,
            masked=int(row.masked),
            rewards=row.rewards,
            total=float(row.total or 0.0),
        )
        for row in connection.execute(query.group_by(*keys).order_by(*keys))
    ]


def evaluation_matrix(pool: Pool, run_id: int) -> EvaluationMatrix:
    """Return the first and the last finished evaluation of a training run, and of others of the pool."""
    with snapshot(pool) as connection:
        found, older = newest_evaluations(connection)
        known: dict[int, dict[int, Evaluates]] = defaultdict(dict)
        for id, (_, of) in found.items():
            if of is not None:
                known[of.run_id][id] = of
        if run_id not in known:
            return EvaluationMatrix([], older)
        order = [run_id, *(other for other in known if other != run_id)][:MOST_POLICIES]
        kept = {each: current(connection, each, known[each]) for each in order}
    ends = {each: _ends(pool, [Evaluation(run_id=id, name=found[id][0], of=of) for id, of in kept[each].items()])
            for each in order}  # fmt: skip
    with snapshot(pool) as connection:
        lines = [line for each in order for line in _lines(connection, each, ends[each])]
    return EvaluationMatrix(lines, older)


def _ends(pool: Pool, some: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the first and the last of these evaluations that are finished."""
    first = next((each for each in some[:UNFINISHED] if is_finished(pool, each)), None)
    last = next((each for each in some[: -UNFINISHED - 1 : -1] if is_finished(pool, each)), None)
    return list(dict.fromkeys(each for each in (first, last) if each is not None))


def _lines(connection: Connection, run_id: int, some: Sequence[Evaluation]) -> Iterator[MatrixLine]:
    agents = _trained_agents(connection, run_id) if some else set()
    by_run = defaultdict(list)
    for cell in evaluated_cells(connection, run_id, [each.run_id for each in some]):
        by_run[cell.run_id].append(cell)
    for each in some:
        cells, of = by_run[each.run_id], each.of
        trained = {name for name in agents if name} | {cell.agent for cell in cells if cell.named in agents}
        yield MatrixLine(
            run=of.run,
            trained=sorted(trained) if of.step else [],
            step=of.step,
            version=of.version,
            evaluation=each.name,
            cells=_merged(cells, agents),
        )


def _merged(cells: Sequence[EvaluatedCell], agents: Collection[str | None]) -> list[MatrixCell]:
    """Add up the domains."""
    columns = defaultdict(list)
    for cell in cells:
        columns[cell.agent, cell.named not in agents, cell.tasks].append(cell)
    merged = []
    for (agent, held_out, kind), some in sorted(columns.items()):
        rewards = sum(cell.rewards for cell in some)
        merged.append(
            MatrixCell(
                agent=agent,
                agent_held_out=held_out,
                tasks=kind,
                rollouts=sum(cell.rollouts for cell in some),
                masked=sum(cell.masked for cell in some),
                rewards=rewards,
                reward=sum(cell.total for cell in some) / rewards if rewards else None,
            )
        )
    return merged


def _trained_agents(connection: Connection, run_id: int) -> set[str | None]:
    """Return the agents of a training run's newest groups, without held-out groups."""
    opened = select(groups.c.agent, groups.c.purpose).where(groups.c.run_id == run_id)
    newest = opened.order_by(groups.c.queue_index.desc()).limit(NEWEST_TRAINED).subquery()
    return set(connection.scalars(select(newest.c.agent).where(newest.c.purpose.is_(None)).distinct()))


def _trained_tasks(connection: Connection, run_id: int, ids: Collection[int]) -> tuple[list[str], bool]:
    """Return the names of the evaluated tasks that were trained; whether all the others are known to be held out.

    Evaluations of a training run are at the same tasks, so a name stands for one task in all of them.
    """
    newest = select(func.max(tasks.c.id)).where(tasks.c.run_id.in_(ids)).group_by(tasks.c.name).limit(MOST_TASKS)
    evaluated = connection.execute(select(tasks.c.name, tasks.c.spec).where(tasks.c.id.in_(newest))).all()
    names = {row.name: content_of(row.spec) for row in evaluated}
    of_run = select(tasks.c.id, tasks.c.spec).where(tasks.c.run_id == run_id)
    first = connection.execute(of_run.order_by(tasks.c.name).limit(MOST_TASKS + 1)).all()
    named: Sequence[Any] = connection.execute(of_run.where(tasks.c.name.in_(list(names)))).all() if names else ()
    contents = set(names.values())
    same = {row.id: content for row in (*first, *named) if (content := content_of(row.spec)) in contents}
    candidates, trained = list(same), set[str]()
    for start in range(0, len(candidates), TASKS_PER_QUERY):  # one trained task settles all that ask for the same
        some = [id for id in candidates[start : start + TASKS_PER_QUERY] if same[id] not in trained]
        trained |= {same[id] for id in _with_group(connection, some)} if some else set()
    whole = len(first) <= MOST_TASKS and len(evaluated) < MOST_TASKS
    return [name for name, content in names.items() if content in trained], whole


def _with_group(connection: Connection, ids: Collection[int]) -> set[int]:
    """Return those of these tasks of which a group was opened to train."""
    mine = (groups.c.task_id == tasks.c.id) & groups.c.purpose.is_(None)
    one = select(groups.c.id).where(mine).limit(1).correlate(tasks).scalar_subquery()
    return set(connection.scalars(select(tasks.c.id).where(tasks.c.id.in_(ids), one.is_not(None))))
