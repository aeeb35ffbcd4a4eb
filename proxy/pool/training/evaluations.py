"""Evaluations of a training run while it trains: each is a run of its own for one version of the policy.

Such a run has the purpose `eval`, and its config says what it evaluates, so a harness that starts again knows which
versions were evaluated. Its groups are in no queue of the training run. Not here: who starts evaluations
(harness/evaluation), and what came out (proxy/pool/inspect/evaluated.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Select, func, select

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.processes.owners import PoolProcess, database_time, is_alive, this_process
from proxy.pool.rollouts.queue import opened_in_order, replacements
from proxy.pool.rollouts.runs import Run, find_run, open_run
from proxy.pool.schema import groups, rollouts, runs
from proxy.pool.training.steps import Version, current_names, versions

KEY = "evaluates"
"""The key in a run's config that says what the run evaluates."""


class Evaluates(msgspec.Struct, frozen=True, kw_only=True):
    """What a run evaluates."""

    run: str
    """Name of the training run."""
    run_id: int
    version: str
    """Name of the version that the engines served when it began. Others may have sampled some of it."""
    step: int
    engine: str = ""
    """URL of the engine that the trainer is asked to leave at this version until it has ended; empty: none."""
    rollouts: int
    """How many it has."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of a training run."""

    run_id: int
    """Its own id."""
    name: str
    of: Evaluates


def open_evaluation(
    pool: Pool, run: Run, version: Version, what: Mapping[str, Any], *, engine: str, rollouts: int
) -> Evaluation:
    """Open the run that evaluates a version. `what`: its tasks and agents. `engine`: see Evaluates."""
    of = Evaluates(
        run=run.name, run_id=run.id, version=version.name, step=version.step, engine=engine, rollouts=rollouts
    )
    name = f"{run.name}-eval-{version.name}"
    opened = open_run(pool, name, "eval", {**what, KEY: msgspec.to_builtins(of)})
    return Evaluation(run_id=opened.id, name=name, of=of)


def evaluations(pool: Pool, run_id: int) -> list[Evaluation]:
    """Return the evaluations of a training run in the order of their steps, without those of retired versions."""
    current = {version.name for version in versions(pool, run_id)}
    found = [each for each in all_evaluations(pool) if each.of.run_id == run_id and each.of.version in current]
    return sorted(found, key=lambda each: each.of.step)


def all_evaluations(pool: Pool) -> list[Evaluation]:
    """Return the evaluations of all training runs of a pool, in the order in which they began."""
    query = select(runs.c.id, runs.c.name, runs.c.config).where(runs.c.purpose == "eval").order_by(runs.c.id)
    with pool.read() as connection:
        rows = connection.execute(query).all()
    asked_for = ((row, what_it_evaluates(row.config)) for row in rows)
    return [Evaluation(run_id=row.id, name=row.name, of=of) for row, of in asked_for if of is not None]


def newest_of_chains(run_ids: Sequence[int]) -> Select[tuple[int]]:
    """Return the query for the groups of evaluations that count: of each chain of replacements the newest one."""
    chain = func.coalesce(groups.c.replaces, groups.c.id)
    return select(func.max(groups.c.id)).where(groups.c.run_id.in_(run_ids)).group_by(chain)


def is_finished(pool: Pool, evaluation: Evaluation) -> bool:
    """Whether every agent of an evaluation was given every task, all have ended, and no replacement is owed.

    Its groups have one member each.
    """
    unfinished = select(func.count()).select_from(rollouts).join(groups)
    unfinished = unfinished.where(groups.c.run_id == evaluation.run_id, rollouts.c.finished_at.is_(None))
    if opened_in_order(pool, evaluation.run_id) < evaluation.of.rollouts:
        return False
    with pool.read() as connection:
        if connection.scalar(unfinished):
            return False
    return not replacements(pool, evaluation.run_id, 0)


def evaluated_by(pool: Pool, run_id: int) -> Evaluates | None:
    """Return what a run evaluates; None: it is no evaluation of a training run."""
    with pool.read() as connection:
        return what_it_evaluates(connection.scalar(select(runs.c.config).where(runs.c.id == run_id)) or {})


def held_engines(pool: Pool, run_id: int) -> dict[str, str]:
    """Return the engines that evaluations of a training run want held while their harness is alive: URL -> version."""
    columns = (runs.c.config, runs.c.owner, runs.c.owner_seen_at)
    query = select(*columns).where(runs.c.purpose == "eval", runs.c.owner.is_not(None))
    held: dict[str, str] = {}
    with pool.read() as connection:
        now = database_time(connection, pool)
        rows = [row for row in connection.execute(query) if row.owner is not None]
    for row in rows:
        of = what_it_evaluates(row.config)
        if of is None:
            continue
        owner = msgspec.convert(row.owner, PoolProcess)
        if of.run_id == run_id and of.engine and is_alive(owner, this_process(), now - row.owner_seen_at):
            held[of.engine] = of.version
    kept = current_names(pool, run_id, set(held.values()))[1] if held else frozenset[str]()
    return {url: version for url, version in held.items() if version in kept}  # no rollback has retired it


def find_teacher(pool: Pool, name: str) -> Run:
    """Return the run of this name, to imitate it. UserError where it is for evaluation."""
    run = find_run(pool, name)
    if run.purpose == "eval":
        of = what_it_evaluates(run.config)
        what = "is of `harness eval`" if of is None else f"evaluates the run {of.run!r}"
        raise UserError(
            f"run {name!r} {what}, so nothing is trained on it; name another run, such as one of `harness collect`"
        )
    return run


def what_it_evaluates(config: Mapping[str, Any]) -> Evaluates | None:
    """Return what a run with this config evaluates; None: no training run asked for it."""
    return msgspec.convert(config[KEY], Evaluates) if KEY in config else None
