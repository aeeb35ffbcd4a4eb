"""The queue of a run as what it is: slots in the order of their turn, who waits for whom, and what left it unused."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from sqlalchemy import Connection, Row, func, select

from proxy.pool.browse.runs import COUNTED, WORKERS, counted, is_there, newest_group, worker
from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.processes.owners import database_time
from proxy.pool.rollouts.runs import Admission, admission
from proxy.pool.schema import groups, policy_versions, rollouts, runs, tasks
from proxy.pool.training.windowed_fifo import LeaseRule, pick
from proxy.pool.untrained import UntrainedReason

MOST_SLOTS = 512
"""Slots that are shown. A run with more open groups shows the oldest ones."""
NEWEST_DROPPED = 512
"""The newest dropped groups, by whose reasons the present losses are counted."""


@dataclass(frozen=True)
class QueueSlot:
    """A group in the queue."""

    group_id: int
    queue_index: int
    position: int
    state: str
    task: str
    agent: str | None
    step: int | None
    size: int
    members: int
    finished: int
    rewards: int
    age_seconds: float
    """Since it was opened."""
    in_window: bool
    """Whether the next step may take it, as groups stand now, once it is done."""


@dataclass(frozen=True)
class DroppedGroups:
    """How many of a run's newest dropped groups had one reason."""

    reason: str
    groups: int
    meaning: str


@dataclass(frozen=True)
class Queue:
    """The queue of a run at one moment."""

    slots: list[QueueSlot]
    """RUNNING, DONE and LEASED groups in the order of their positions; held-out ones have none."""
    more: bool
    """There are further ones."""
    open_groups: int
    limit: int | None
    """None: no trainer has set it."""
    attended: bool
    """A harness works at the run. Where none does, the rollouts of its RUNNING groups do not run."""
    step_groups: int | None
    """Groups that a step takes. None: no trainer has said."""
    window: int | None
    """Groups, from the oldest waiting one, among which it takes them. None: among all, or no trainer has said."""
    running: int
    done: int
    leased: int
    held_out_running: int
    counted_to: int
    """Up to this number the four above are counted."""
    opened: int
    """Groups that the run has opened so far."""
    waits: str
    """Who waits for whom, in a sentence; "": nobody does, or it cannot be told."""
    dropped: list[DroppedGroups]
    dropped_of: int
    """The number of newest dropped groups that `dropped` counts."""
    paused: str
    dropped_tasks: int
    unpushed: int | None
    """The step whose weights are published and not pushed yet; None: there is none."""


def queue(pool: Pool, run_id: int) -> Queue:
    """Return the queue of a run."""
    now = admission(pool, run_id)  # a moment before the rest
    with snapshot(pool) as connection:
        at = database_time(connection, pool)
        columns = (runs.c.purpose, runs.c.lease_groups, runs.c.lease_window, *WORKERS)
        run = connection.execute(select(*columns).where(runs.c.id == run_id)).one()
        rows = _rows(connection, run_id)
        lease = run.lease_groups, run.lease_window
        end = window_end([(row.position, row.state) for row in rows], *lease)
        slots = _slots(connection, rows[: MOST_SLOTS + 1], at, end)
        shown = slots[:MOST_SLOTS]
        dropped = _dropped(connection, run_id)
        newest = _newest(connection, run_id)
        counts = {state: counted(connection, run_id, state) for state in ("RUNNING", "DONE", "LEASED")}
        held_out = counted(connection, run_id, "RUNNING", "eval")
        opened = newest_group(connection, run_id)
    unpushed = newest.step if newest is not None and newest.pushed_at is None else None
    harness = is_there(worker(run.owner, run.owner_seen_at, at))
    trainer = is_there(worker(run.trainer, run.trainer_seen_at, at))
    waits = "" if run.purpose != "train" else _waits(slots, now, unpushed, _fills(slots, *lease))
    if not harness and not trainer:
        waits = _nobody(now)
    return Queue(
        slots=shown,
        more=len(slots) > MOST_SLOTS,
        open_groups=now.open_groups,
        limit=now.queue_limit,
        attended=harness,
        step_groups=run.lease_groups,
        window=run.lease_window,
        running=counts["RUNNING"],
        done=counts["DONE"],
        leased=counts["LEASED"],
        held_out_running=held_out,
        counted_to=COUNTED,
        opened=opened,
        waits=waits,
        dropped=dropped,
        dropped_of=sum(each.groups for each in dropped),
        paused=now.paused,
        dropped_tasks=now.dropped_tasks,
        unpushed=unpushed,
    )


def window_end(queue: Sequence[tuple[int, str]], step_groups: int | None, window: int | None) -> float:
    """Return the position behind the last group that the next step may take. `queue`: (position, state), in order.

    The window begins at the oldest group that waits, and moves on behind those that the step takes for certain: the
    finished ones at its beginning (proxy/pool/training/windowed_fifo.py: pick).
    """
    waiting = [(position, state) for position, state in queue if state != "LEASED"]
    if window is None or not waiting:
        return math.inf
    certain = list(takewhile(lambda slot: slot[1] == "DONE", waiting))
    if step_groups is not None and len(certain) >= step_groups:
        return certain[step_groups - 1][0] + 1
    begin = (waiting[len(certain)] if len(certain) < len(waiting) else waiting[-1])[0]
    return begin + window


def _fills(slots: Sequence[QueueSlot], step_groups: int | None, window: int | None) -> bool:
    """Whether a step finds enough finished groups now. Groups that it would drop or skip are not known here."""
    if step_groups is None:
        return False
    rule = LeaseRule(groups=step_groups, window=window, max_staleness=0)
    return bool(pick([(slot.position, slot.state) for slot in slots], rule)[0])


def _nobody(now: Admission) -> str:
    """Say that neither harness nor trainer works at a run, whether it has finished, was stopped, or was killed."""
    return "nobody works at the run" + (f", and rule {now.paused} has paused it" if now.paused else "")


def _waits(slots: Sequence[QueueSlot], now: Admission, unpushed: int | None, fills: bool) -> str:
    """Say who waits for whom."""
    full = now.queue_limit is not None and not now.room
    if now.paused:
        return f"harness and trainer wait for a person: rule {now.paused} has paused the run"
    if any(slot.state == "LEASED" for slot in slots):
        return "the trainer works at the leased groups" + ("; the harness waits for it" if full else "")
    if full and unpushed is not None:
        return f"the harness waits for the weights of step {unpushed}, which are not pushed yet"
    if fills:
        return "the harness waits for the trainer: as many groups are open as may be" if full else ""
    if slots and slots[0].state == "RUNNING" and any(slot.state == "DONE" for slot in slots):
        head = slots[0]
        rest = head.members - head.finished
        return f"the window begins at group {head.queue_index} ({head.task}), of which {rest} rollouts have not ended"
    if any(slot.state == "RUNNING" for slot in slots):
        return "the trainer waits for rollouts"
    return "the harness waits for the trainer: as many groups are open as may be" if full else ""


def _rows(connection: Connection, run_id: int) -> list[Row[Any]]:
    """Return the groups in the queue by position: of each state the oldest ones, one more than are shown."""
    ids = [
        row.id
        for state in ("RUNNING", "DONE", "LEASED")
        for row in connection.execute(
            select(groups.c.id)
            .where(groups.c.run_id == run_id, groups.c.state == state, groups.c.purpose.is_(None))
            .order_by(groups.c.position + 0)  # else SQLite walks all groups by position to find those of the state
            .limit(MOST_SLOTS + 1)
        )
    ]
    query = (
        select(groups, tasks.c.name.label("task"))
        .join_from(groups, tasks, tasks.c.id == groups.c.task_id)
        .where(groups.c.id.in_(ids))
    )
    return list(connection.execute(query.order_by(groups.c.position)))


def _slots(connection: Connection, rows: Sequence[Row[Any]], now: float, end: float) -> list[QueueSlot]:
    """Return the slots of these groups. `end`: the position behind the window."""
    members = (
        select(
            rollouts.c.group_id,
            func.count().label("members"),
            func.count(rollouts.c.finished_at).label("finished"),
            func.count(rollouts.c.reward).label("rewards"),
        )
        .where(rollouts.c.group_id.in_([row.id for row in rows]))
        .group_by(rollouts.c.group_id)
    )
    counts = {row.group_id: row for row in connection.execute(members)}
    return [_slot(row, counts.get(row.id), now, end) for row in rows]


def _slot(row: Row[Any], counts: Row[Any] | None, now: float, end: float) -> QueueSlot:
    return QueueSlot(
        group_id=row.id,
        queue_index=row.queue_index,
        position=row.position,
        state=row.state,
        task=row.task,
        agent=row.agent,
        step=row.step,
        size=row.size,
        members=counts.members if counts else 0,
        finished=counts.finished if counts else 0,
        rewards=counts.rewards if counts else 0,
        age_seconds=max(0.0, now - row.created_at),
        in_window=row.state != "LEASED" and row.position < end,
    )


def _dropped(connection: Connection, run_id: int) -> list[DroppedGroups]:
    """Count the newest dropped groups by reason, most frequent first."""
    mine = (groups.c.run_id == run_id) & (groups.c.state == "TOMBSTONE") & groups.c.purpose.is_(None)
    newest = select(groups.c.reason).where(mine).order_by(groups.c.id.desc()).limit(NEWEST_DROPPED)
    counts = Counter(reason or "reason_not_stored" for reason in connection.scalars(newest))
    return [DroppedGroups(reason, count, _meaning(reason)) for reason, count in counts.most_common()]


def _meaning(reason: str) -> str:
    try:
        return UntrainedReason(reason).meaning  # type: ignore[call-arg]  # mypy reads __new__, not the lookup
    except ValueError:
        return ""


def _newest(connection: Connection, run_id: int) -> Any:
    current = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None)
    columns = (policy_versions.c.step, policy_versions.c.pushed_at)
    return connection.execute(
        select(*columns).where(current).order_by(policy_versions.c.step.desc()).limit(1)
    ).one_or_none()
