"""What the monitor of a run did, beside telling: pauses, rollbacks that discard batches, dropped tasks.

Each is a row, written in the transaction that does it, so that it happens once however often the trainer starts again.
`trainer rollback --discard` and `trainer continue` use the same functions.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, func, insert, select, update

from proxy.pool.database import Pool, retried
from proxy.pool.processes.owners import demand_trainer
from proxy.pool.rollouts.failures import FAILURES
from proxy.pool.rollouts.runs import is_paused, lock_run
from proxy.pool.rollouts.states import move
from proxy.pool.schema import groups, interventions, rollouts, tasks
from proxy.pool.training.steps import retire_after
from proxy.pool.training.windowed_fifo import leave_out
from proxy.pool.untrained import Untrained, UntrainedReason


@dataclass(frozen=True)
class Cause:
    """Why something is done to a run."""

    rule: str
    """A rule of the monitor, or who asks."""
    detail: str
    version_id: int | None = None
    """The version of the step whose figures are the cause; None: a person asks."""


@dataclass(frozen=True)
class Intervention:
    """Something that was done to a run."""

    rule: str
    action: str
    detail: str
    at: float
    task: str | None
    """The dropped task."""
    ended_at: float | None
    """When a person ended a pause."""


@retried
def discard_after(pool: Pool, run_id: int, step: int, cause: Cause, trainer: str | None = None) -> int:
    """Go back to the checkpoint of `step` and discard the batches of later steps; return the number of their groups.

    The versions of these steps are retired. Rollouts that these have sampled, and that no step had taken, are left out
    as `rolled_back` by the lease. UserError when another trainer owns the run.
    """
    with pool.write() as connection:
        lock_run(connection, run_id)
        demand_trainer(connection, run_id, trainer)
        retire_after(connection, run_id, step)
        later = (groups.c.run_id == run_id) & (groups.c.step > step)
        values = {"step": None, **_discarded(cause.rule)}
        count = sum(move(connection, later, state, "TOMBSTONE", **values) for state in ("CONSUMED", "LEASED"))
        _record(connection, run_id, "rollback", cause)
        return count


@retried
def pause(pool: Pool, run_id: int, cause: Cause, trainer: str | None = None) -> None:
    """Pause a run: its trainer takes no further step, and its harness opens no further group, until `go_on`."""
    with pool.write() as connection:
        lock_run(connection, run_id)
        demand_trainer(connection, run_id, trainer)
        _record(connection, run_id, "pause", cause)


@retried
def go_on(pool: Pool, run_id: int) -> int:
    """End the pauses of a run; return their number."""
    with pool.write() as connection:
        return connection.execute(update(interventions).where(is_paused(run_id)).values(ended_at=time.time())).rowcount


@retried
def drop_tasks(pool: Pool, run_id: int, names: Collection[str], cause: Cause, trainer: str | None = None) -> list[str]:
    """Open no further groups of these tasks, and call off those that no step has; return the tasks dropped just now.

    Groups that are held out for evaluation go on. UserError when another trainer owns the run.
    """
    with pool.write() as connection:
        lock_run(connection, run_id)
        demand_trainer(connection, run_id, trainer)
        known = select(tasks.c.id, tasks.c.name).where(tasks.c.run_id == run_id, tasks.c.name.in_(names))
        dropped = select(interventions.c.task_id).where(interventions.c.task_id.is_not(None))
        new = connection.execute(known.where(tasks.c.id.not_in(dropped)).order_by(tasks.c.id)).all()
        for row in new:
            _record(connection, run_id, "drop_task", cause, row.id)
            of_task = (groups.c.task_id == row.id) & groups.c.purpose.is_(None)
            running = select(groups.c.id).where(of_task, groups.c.state == "RUNNING")
            unfinished = rollouts.c.group_id.in_(running) & rollouts.c.finished_at.is_(None)
            called_off = {"failure": "called_off", "detail": FAILURES["called_off"].text, "finished_at": time.time()}
            connection.execute(update(rollouts).where(unfinished).values(called_off))
            for state in ("RUNNING", "DONE"):
                move(connection, of_task, state, "TOMBSTONE", **_discarded(cause.rule))
        return [row.name for row in new]


@retried
def mask(pool: Pool, run_id: int, step: int, rules: Mapping[int, str], trainer: str | None = None) -> None:
    """Leave out these rollouts of a leased step, each for its rule, and no other that a rule left out before.

    UserError when another trainer owns the run.
    """
    with pool.write() as connection:
        lock_run(connection, run_id)
        demand_trainer(connection, run_id, trainer)
        leased = select(groups.c.id).where(groups.c.run_id == run_id, groups.c.step == step)
        before = rollouts.c.group_id.in_(leased) & rollouts.c.left_out.startswith(UntrainedReason.MONITOR)
        connection.execute(update(rollouts).where(before).values(left_out=None))
        leave_out(connection, {id: Untrained(UntrainedReason.MONITOR, rule) for id, rule in rules.items()})


def done_for(pool: Pool, run_id: int, rule: str, version_id: int) -> bool:
    """Whether a pause or rollback for this rule and the figures of this version's step is done already."""
    mine = (interventions.c.run_id == run_id) & (interventions.c.rule == rule)
    once = interventions.c.action.in_(("pause", "rollback")) & (interventions.c.version_id == version_id)
    with pool.read() as connection:
        return connection.scalar(select(interventions.c.id).where(mine, once).limit(1)) is not None


def rollbacks_of(pool: Pool, run_id: int, rule: str) -> int:
    """Count the rollbacks for a rule since the last pause for it."""
    mine = (interventions.c.run_id == run_id) & (interventions.c.rule == rule)
    last_pause = select(func.max(interventions.c.id)).where(mine, interventions.c.action == "pause").scalar_subquery()
    since = (interventions.c.action == "rollback") & (interventions.c.id > func.coalesce(last_pause, 0))
    with pool.read() as connection:
        return connection.scalar(select(func.count()).where(mine, since)) or 0


def paused(pool: Pool, run_id: int) -> str:
    """Return why a run is paused; "": it is not."""
    with pool.read() as connection:
        row = connection.execute(select(interventions).where(is_paused(run_id)).limit(1)).one_or_none()
    return "" if row is None else f"{row.rule}: {row.detail}"


def history_of(pool: Pool, run_id: int, newest: int | None = None) -> list[Intervention]:
    """Return what was done to a run, in order: the newest so many, or everything."""
    mine = select(interventions).where(interventions.c.run_id == run_id)
    some = mine.order_by(interventions.c.id.desc()).limit(newest).subquery()
    query = select(some, tasks.c.name).outerjoin(tasks, tasks.c.id == some.c.task_id).order_by(some.c.id)
    with pool.read() as connection:
        rows = connection.execute(query).all()
    return [Intervention(row.rule, row.action, row.detail, row.at, row.name, row.ended_at) for row in rows]


def _discarded(rule: str) -> dict[str, object]:
    return {"reason": UntrainedReason.DISCARDED, "detail": rule, "finished_at": time.time()}


def _record(connection: Connection, run_id: int, action: str, cause: Cause, task_id: int | None = None) -> None:
    values = {"run_id": run_id, "at": time.time(), "rule": cause.rule, "action": action, "detail": cause.detail}
    connection.execute(insert(interventions).values(values | {"version_id": cause.version_id, "task_id": task_id}))
