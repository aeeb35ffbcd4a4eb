"""Train steps and policy versions: publish them, mark them as pushed, go back to an earlier one.

The order of a step: lease, optimizer step, durable checkpoint, `publish` (one transaction), push, `mark_pushed`.
Wherever the process dies, `latest` names the checkpoint to resume from, and leasing the next step returns its groups.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from proxy.pool.database import Pool, insert_row, retried
from proxy.pool.errors import UserError
from proxy.pool.processes.owners import demand_trainer
from proxy.pool.rollouts.runs import current_version, lock_run, version_name, version_of
from proxy.pool.rollouts.states import move
from proxy.pool.schema import groups, policy_versions, train_steps
from proxy.pool.training.fates import RolloutFate, sums, write_fates
from proxy.pool.training.imitation import write_imitated
from proxy.pool.training.settled import of_steps, settle, unsettle
from proxy.pool.untrained import UntrainedReason

START_AGAIN = "start the trainer again, which goes on from the newest version"
PHASES = ("wait", "prepare", "train", "checkpoint", "report", "push")
"""The phases of a step in their order: the names in its metric `seconds`."""
HISTOGRAMS = ("staleness_groups", "staleness_tokens")
"""Metrics that count values: {"0": 12, "1": 3}."""


@dataclass(frozen=True)
class Version:
    """A published policy version. Its id, and so its name, is never used twice in a pool."""

    id: int
    run_id: int
    step: int
    checkpoint: str
    hf_dir: str
    pushed_at: float | None
    created_at: float

    @property
    def name(self) -> str:
        return version_name(self.id)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A finished step: its number (0: the initial weights), the directories of its weights, its metrics."""

    step: int
    checkpoint: str
    hf_dir: str
    metrics: dict[str, Any]
    parent: int | None = None
    """Id of the version that the step grew from; None for the first version of a run."""
    fates: Sequence[RolloutFate] = ()
    """What the step did with each rollout of its groups."""
    scales: dict[str, Any] | None = None
    """The running deviations by domain after the step (trainer/credit/scales.py); None: the step kept none."""
    imitated: Mapping[int, int] = field(default_factory=dict)
    """How many tokens of each completion the step imitated."""


@retried
def publish(pool: Pool, run_id: int, done: Published, trainer: str | None = None) -> Version:
    """Store a new version with its metrics and fates and make its step's groups CONSUMED.

    Repeating a step changes nothing.

    `trainer`: the token of the trainer that owns the run; None: none does. UserError for another one, and when the
    step grew from another version than the run's newest.
    """
    with pool.write() as connection:
        lock_run(connection, run_id)  # so that two trainers cannot publish the same step twice
        demand_trainer(connection, run_id, trainer)
        row = _at_step(connection, run_id, done.step)
        if row is not None and (row.checkpoint, row.hf_dir) != (done.checkpoint, done.hf_dir):
            raise UserError(f"step {done.step} of the run is published already, with {row.checkpoint}; {START_AGAIN}")
        if row is None:
            newest = current_version(connection, run_id)
            if (newest.id if newest else None) != done.parent:
                raise UserError(
                    f"step {done.step} grew from {_name(done.parent)}, and the newest version of the run is "
                    f"{_name(newest.id if newest else None)}; {START_AGAIN}"
                )
            before = of_steps(connection, run_id)
            move(connection, (groups.c.run_id == run_id) & (groups.c.step == done.step), "LEASED", "CONSUMED")
            values = {"run_id": run_id, "step": done.step, "checkpoint": done.checkpoint, "hf_dir": done.hf_dir}
            version_id = insert_row(connection, policy_versions, values | {"created_at": time.time()})
            write_fates(connection, version_id, done.fates)
            write_imitated(connection, done.imitated)
            own = sums(done.fates)
            values = {"version_id": version_id, "metrics": done.metrics, "fates": own.to_json(), "scales": done.scales}
            connection.execute(insert(train_steps).values(values | {"so_far": (before + own).to_json()}))
            settle(connection, run_id)
            row = _at_step(connection, run_id, done.step)
        assert row is not None
        return _version(row)


@retried
def drop_batch(pool: Pool, run_id: int, step: int, why: UntrainedReason, trainer: str | None = None) -> list[int]:
    """Make the groups that an unpublished step has leased TOMBSTONEs, so that it leases others; return their ids.

    UserError when another trainer owns the run.
    """
    with pool.write() as connection:
        lock_run(connection, run_id)
        demand_trainer(connection, run_id, trainer)
        leased = (groups.c.run_id == run_id) & (groups.c.step == step)
        query = select(groups.c.id).where(leased, groups.c.state == "LEASED").order_by(groups.c.id)
        ids = list(connection.scalars(query))
        values = {"step": None, "reason": why, "detail": f"step {step}", "finished_at": time.time()}
        move(connection, leased, "LEASED", "TOMBSTONE", **values)
        return ids


def latest(pool: Pool, run_id: int) -> Version | None:
    """Return the last published version of a run; None before step 0."""
    with pool.read() as connection:
        row = current_version(connection, run_id)
    return None if row is None else _version(row)


def newest(pool: Pool) -> str:
    """Return the name of the version that engines should serve: the latest of the run that published last; "": none."""
    last = select(policy_versions.c.run_id).order_by(policy_versions.c.id.desc()).limit(1)
    with pool.read() as connection:
        run_id = connection.execute(last).scalar()
        row = None if run_id is None else current_version(connection, run_id)
    return "" if row is None else version_name(row.id)


def current_names(pool: Pool, run_id: int, names: Collection[str]) -> tuple[str, frozenset[str]]:
    """Return the name of the run's newest version ("": none), and those of these names that are versions of the run."""
    ids = {version_id for name in names if (version_id := version_of(name)) is not None}
    of_run = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None)
    with pool.read() as connection:
        newest = current_version(connection, run_id)
        known = connection.scalars(select(policy_versions.c.id).where(of_run, policy_versions.c.id.in_(ids))).all()
    return version_name(newest.id) if newest else "", frozenset(map(version_name, known))


def successor(pool: Pool, name: str) -> Version | None:
    """Return the newest version of the run that this version belongs to: an engine that served this one needs it."""
    of_run = select(policy_versions.c.run_id).where(policy_versions.c.id == int(name.removeprefix("v")))
    with pool.read() as connection:
        run_id = connection.execute(of_run).scalar()
        row = None if run_id is None else current_version(connection, run_id)
    return None if row is None else _version(row)


def versions(pool: Pool, run_id: int) -> list[Version]:
    """Return the versions of a run that are not retired, by step."""
    query = select(policy_versions).where(policy_versions.c.run_id == run_id, policy_versions.c.retired_at.is_(None))
    with pool.read() as connection:
        return [_version(row) for row in connection.execute(query.order_by(policy_versions.c.step))]


@retried
def mark_pushed(pool: Pool, version: Version, trainer: str | None = None) -> None:
    """Record that the engines serve this version. From then on its step makes room for new groups.

    UserError when another trainer owns the run.
    """
    with pool.write() as connection:
        lock_run(connection, version.run_id)
        demand_trainer(connection, version.run_id, trainer)
        chosen = policy_versions.c.id == version.id
        connection.execute(update(policy_versions).where(chosen).values(pushed_at=time.time()))


@retried
def reopen_after(pool: Pool, run_id: int, step: int, trainer: str | None = None) -> int:
    """Go back to the checkpoint of `step`; return the number of reopened groups.

    Batches of later steps are LEASED again under their own step, so that they are trained again unchanged. The versions
    that they led to are retired. UserError when another trainer owns the run, and when calls of these groups have left
    the pool.
    """
    with pool.write() as connection:
        lock_run(connection, run_id)
        demand_trainer(connection, run_id, trainer)
        later = (groups.c.run_id == run_id) & (groups.c.step > step)
        left = connection.scalar(select(func.max(groups.c.step)).where(later, groups.c.dropped_at.is_not(None)))
        if left is not None:
            raise UserError(
                f"the rollouts of steps up to {left} have left the pool for an archive, so no step can train them; go "
                f"back to step {left} or a later one"
            )
        retire_after(connection, run_id, step)
        return move(connection, later, "CONSUMED", "LEASED")


def retire_after(connection: Connection, run_id: int, step: int) -> None:
    """Retire the versions after `step` of a run, which the caller has locked, before their groups change."""
    unsettle(connection, run_id, groups.c.step > step)
    retired = (policy_versions.c.run_id == run_id) & (policy_versions.c.step > step)
    now = policy_versions.c.retired_at.is_(None)
    connection.execute(update(policy_versions).where(retired, now).values(retired_at=time.time()))


@retried
def add_metrics(pool: Pool, version_id: int, more: dict[str, Any]) -> None:
    """Add metrics to a published step that are known only later, such as the duration of its push."""
    mine = train_steps.c.version_id == version_id
    with pool.write() as connection:
        known: dict[str, Any] = connection.scalars(select(train_steps.c.metrics).where(mine)).one()
        connection.execute(update(train_steps).where(mine).values(metrics=known | more))


def metrics(pool: Pool, run_id: int) -> list[dict[str, Any]]:
    """Return the metrics of every published step in order, each with its `step`."""
    return [{"step": version.step} | values for version, values in history(pool, run_id)]


def newest_metrics(pool: Pool, run_id: int) -> dict[str, Any]:
    """Return the metrics of the run's newest step; none before step 0."""
    with pool.read() as connection:
        version = current_version(connection, run_id)
        mine = train_steps.c.version_id == (None if version is None else version.id)
        known: dict[str, Any] | None = connection.scalar(select(train_steps.c.metrics).where(mine))
    return known or {}


def recent_metrics(pool: Pool, run_id: int, count: int) -> list[dict[str, Any]]:
    """Return the metrics of the run's newest train steps in order, each with its `step`; `count` of them at most."""
    mine = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None) & (policy_versions.c.step > 0)
    query = select(policy_versions.c.step, train_steps.c.metrics).join_from(train_steps, policy_versions).where(mine)
    with pool.read() as connection:
        rows = connection.execute(query.order_by(policy_versions.c.step.desc()).limit(count)).all()
    return [{"step": step} | metrics for step, metrics in reversed(rows)]


def first_metrics(pool: Pool, run_id: int) -> dict[str, Any]:
    """Return the metrics of the run's first train step; none before it is published."""
    mine = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None) & (policy_versions.c.step > 0)
    query = select(train_steps.c.metrics).join_from(train_steps, policy_versions).where(mine)
    with pool.read() as connection:
        known: dict[str, Any] | None = connection.scalar(query.order_by(policy_versions.c.step).limit(1))
    return known or {}


def scales_before(pool: Pool, run_id: int, step: int) -> dict[str, Any] | None:
    """Return the running deviations by domain that a step divides by: those of the step before it."""
    before = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None)
    query = select(train_steps.c.scales).join_from(train_steps, policy_versions)
    with pool.read() as connection:
        scales: dict[str, Any] | None = connection.scalar(query.where(before, policy_versions.c.step == step - 1))
    return scales


def history(pool: Pool, run_id: int) -> list[tuple[Version, dict[str, Any]]]:
    """Return the versions of a run that are not retired, each with the metrics of its step, in order."""
    query = (
        select(policy_versions, train_steps.c.metrics)
        .join_from(train_steps, policy_versions)
        .where(policy_versions.c.run_id == run_id, policy_versions.c.retired_at.is_(None))
        .order_by(policy_versions.c.step)
    )
    with pool.read() as connection:
        return [(_version(row), row.metrics) for row in connection.execute(query)]


def newest_retired(pool: Pool, run_id: int) -> int:
    """Return the id of the newest version that a rollback has retired; 0 when there is none."""
    query = select(func.max(policy_versions.c.id)).where(
        policy_versions.c.run_id == run_id, policy_versions.c.retired_at.is_not(None)
    )
    with pool.read() as connection:
        return connection.scalar(query) or 0


def _at_step(connection: Connection, run_id: int, step: int) -> Row[Any] | None:
    current = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None)
    return connection.execute(select(policy_versions).where(current, policy_versions.c.step == step)).one_or_none()


def _name(version_id: int | None) -> str:
    return "no version" if version_id is None else version_name(version_id)


def _version(row: Row[Any]) -> Version:
    return Version(row.id, row.run_id, row.step, row.checkpoint, row.hf_dir, row.pushed_at, row.created_at)
