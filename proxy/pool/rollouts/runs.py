"""Runs: name, purpose, configuration, and the progress of training."""

import re
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    bindparam,
    func,
    insert,
    select,
    true,
    update,
)

from proxy.pool.database import Pool, insert_if_new, lock_row, locked, retried
from proxy.pool.errors import UserError
from proxy.pool.rollouts.states import GroupState
from proxy.pool.schema import events, groups, interventions, policy_versions, runs

PURPOSES = ("train", "eval", "collect")
RunId = int | ColumnElement[int]


@dataclass(frozen=True)
class Run:
    """One run. `queue_limit` (groups) is None until a trainer has set it."""

    id: int
    name: str
    purpose: str
    config: dict[str, Any]
    queue_limit: int | None
    created_at: float


@dataclass(frozen=True)
class Admission:
    """What a harness needs to know before it opens another group."""

    step: int | None
    """The last published train step; 0: only the initial weights are published; None: nothing is."""
    version: str | None
    open_groups: int
    """Number of groups that are RUNNING or DONE, or that a step took whose weights are not pushed yet."""
    queue_limit: int | None
    paused: str = ""
    """The rule of the monitor that has paused the run; "": it is not paused."""
    dropped_tasks: int = 0
    """Number of tasks that the monitor has dropped."""

    @property
    def room(self) -> int:
        """Number of groups that may be opened now; 0 until a trainer has set a limit, and while the run is paused.

        This is (eta + version + 1) B - (accepted + running) of AReaL (arXiv 2505.24298, equation 3) with the limit
        (eta + 1) B: the groups consumed by pushed versions, version B, cancel out.
        """
        return 0 if self.queue_limit is None or self.paused else max(0, self.queue_limit - self.open_groups)


@retried
def open_run(pool: Pool, name: str, purpose: str, config: dict[str, Any] | None) -> Run:
    """Return the run of this name; open it if it is new. UserError when its purpose or configuration differs.

    The configuration is that of the harness. A trainer may open the run before it and passes None.
    """
    if purpose not in PURPOSES:
        raise UserError(f"purpose {purpose!r} is unknown; choose one of: {', '.join(PURPOSES)}")
    with pool.write() as connection:
        values = {"name": name, "purpose": purpose, "config": config or {}, "created_at": time.time()}
        by_name = select(runs).where(runs.c.name == name)
        if not locked(connection, by_name):
            insert_if_new(connection, runs, values)
        [row] = locked(connection, by_name)
        if row.purpose != purpose:
            raise UserError(f"run {name!r} is a {row.purpose} run, not {purpose}; choose another name")
        if config and not row.config:
            connection.execute(update(runs).where(runs.c.id == row.id).values(config=config))
            return Run(row.id, name, purpose, config, row.queue_limit, row.created_at)
    if config:
        _demand_same(name, row.config, config)
    return _run(row)


def _demand_same(name: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise UserError(
                f"run {name!r} was started with another {key} ({before.get(key)!r}, now {now.get(key)!r}); "
                "repeat the old setting to resume or choose another run directory"
            )


def find_run(pool: Pool, name: str) -> Run:
    """Return the run of this name. UserError with the known names when there is none."""
    with pool.read() as connection:
        row = connection.execute(select(runs).where(runs.c.name == name)).one_or_none()
        if row is not None:
            return _run(row)
        known = connection.scalars(select(runs.c.name).order_by(runs.c.id)).all()
    raise UserError(f"run {name!r} is not in the pool {pool.name}; it holds: {', '.join(known) or 'no runs'}")


@retried
def set_queue_limit(pool: Pool, run_id: int, limit: int) -> None:
    """Set how many groups may be open (Admission). The trainer's limit bounds how stale a group can become."""
    with pool.write() as connection:
        connection.execute(update(runs).where(runs.c.id == run_id).values(queue_limit=limit))


@retried
def note_lease(pool: Pool, run_id: int, groups: int, window: int | None) -> None:
    """Note for readers of the pool what a train step takes (proxy/pool/training/windowed_fifo.py: LeaseRule)."""
    with pool.write() as connection:
        values = {"lease_groups": groups, "lease_window": window}
        connection.execute(update(runs).where(runs.c.id == run_id).values(values))


@retried
def note_directory(pool: Pool, run_id: int, directory: Path) -> None:
    """Note for readers of the pool where the run's harness keeps its files."""
    with pool.write() as connection:
        connection.execute(update(runs).where(runs.c.id == run_id).values(directory=str(directory.absolute())))


def admission(pool: Pool, run_id: int) -> Admission:
    """Read what a harness needs to know before it opens another group."""
    with pool.read() as connection:
        row = connection.execute(_admission(), {"of_run": run_id}).one()
        limit, open_groups, version_id, step, pushed_at, paused, dropped_tasks = row
        if step is not None and pushed_at is None:
            open_groups += _unpushed(connection, run_id)
    version = None if version_id is None else version_name(version_id)
    return Admission(step, version, open_groups, limit, paused or "", dropped_tasks)


def is_paused(run_id: RunId) -> ColumnElement[bool]:
    """Select the pauses of a run that nobody has ended."""
    pause = (interventions.c.run_id == run_id) & (interventions.c.action == "pause")
    return pause & interventions.c.ended_at.is_(None)


@cache
def _admission() -> Select[Any]:
    """One query, made once: a waiting harness asks it again and again, and making it takes longer than its answer."""
    run_id = bindparam("of_run", type_=Integer)
    newest = _newest(run_id).subquery()
    count = select(func.count()).where(_queued(run_id, "RUNNING", "DONE", "LEASED")).scalar_subquery()
    why = select(interventions.c.rule).where(is_paused(run_id)).limit(1).scalar_subquery()
    drops = (interventions.c.run_id == run_id) & (interventions.c.action == "drop_task")
    dropped = select(func.count()).where(drops).scalar_subquery()
    query = select(runs.c.queue_limit, count, newest.c.id, newest.c.step, newest.c.pushed_at, why, dropped)
    return query.select_from(runs).outerjoin(newest, true()).where(runs.c.id == run_id)


def waiting(run_id: int) -> ColumnElement[bool]:
    """Select the groups in the trainer's queue: not leased, not dropped, not held out for evaluation."""
    return _queued(run_id, "RUNNING", "DONE")


def _queued(run_id: RunId, *states: GroupState) -> ColumnElement[bool]:
    return (groups.c.run_id == run_id) & groups.c.purpose.is_(None) & groups.c.state.in_(states)


def _unpushed(connection: Connection, run_id: int) -> int:
    """Count the consumed groups of the steps after the last one whose weights were pushed.

    They count as open: the engines still sample with older weights, so a group that was opened in their place would be
    a version older than the step that it is trained in.
    """
    pushed = connection.execute(_newest(run_id).where(policy_versions.c.pushed_at.is_not(None))).one_or_none()
    later = (groups.c.run_id == run_id) & (groups.c.step > (-1 if pushed is None else pushed.step))
    return connection.scalar(select(func.count()).where(later, groups.c.state != "LEASED")) or 0


def version_name(version_id: int) -> str:
    """Return the name of a policy version, as engines know it."""
    return f"v{version_id}"


def version_of(name: str) -> int | None:
    """Return the id of the policy version of this name; None when no version of a pool has such a name."""
    matched = re.fullmatch(r"v([1-9][0-9]{0,8})", name)
    return int(matched[1]) if matched else None


def current_version(connection: Connection, run_id: int) -> Row[Any] | None:
    """Return the policy_versions row of the run's last published step that no rollback has retired."""
    return connection.execute(_newest(run_id)).one_or_none()


def _newest(run_id: RunId) -> Select[Any]:
    current = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None)
    return select(policy_versions).where(current).order_by(policy_versions.c.step.desc()).limit(1)


@retried
def record_event(pool: Pool, run_id: int | None, kind: str, detail: str) -> None:
    """Add a line to the pool's events."""
    with pool.write() as connection:
        connection.execute(insert(events).values(run_id=run_id, at=time.time(), kind=kind, detail=detail))


@retried
def record_event_once(pool: Pool, run_id: int, kind: str, detail: str, since: float) -> bool:
    """Add a line to the pool's events, unless it stands there since then (Unix seconds); return whether it is new."""
    same = (events.c.run_id == run_id) & (events.c.kind == kind) & (events.c.detail == detail) & (events.c.at >= since)
    with pool.write() as connection:
        if connection.scalar(select(events.c.id).where(same).limit(1)) is not None:
            return False
        connection.execute(insert(events).values(run_id=run_id, at=time.time(), kind=kind, detail=detail))
    return True


def lock_run(connection: Connection, run_id: int) -> None:
    """Lock a run until the transaction ends, so that its queue, leases, versions and outcomes change one at a time."""
    lock_row(connection, runs, run_id)


def _run(row: Row[Any]) -> Run:
    return Run(row.id, row.name, row.purpose, row.config, row.queue_limit, row.created_at)
