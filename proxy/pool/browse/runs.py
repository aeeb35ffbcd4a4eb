"""The runs of a pool, newest first: who works at each, how far it is, what it earns, what alarms."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from sqlalchemy import Connection, Row, Select, case, func, select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.browse.steps import of_steps, spread, step_range
from proxy.pool.database import Pool
from proxy.pool.errors import NotInPool
from proxy.pool.inspect.rule_states import ADVICE, STATES
from proxy.pool.processes.owners import PoolProcess, database_time, is_alive, this_process
from proxy.pool.rollouts.runs import current_version, is_paused, version_name
from proxy.pool.schema import groups, interventions, policy_versions, rollouts, runs, train_steps

PAGE = 25
"""Runs of a page, and names that are offered at once."""
POINTS = 24
"""Steps of the small reward curve of a run."""
NEWEST_GROUPS = 64
"""Finished groups from which the present reward of a run is taken."""
COUNTED = 1000
"""Groups of one state are counted up to this number."""
WALK = 4096
"""Newest runs among which those are looked for that somebody works at."""
MOST_WORKED_AT = 64
"""Runs with the newest heartbeats whose alarms are read."""

WORKERS = (runs.c.owner, runs.c.owner_seen_at, runs.c.trainer, runs.c.trainer_seen_at)
"""Columns that say who works at a run."""

State = Literal["working", "paused", "waiting", "nobody works at it"]


@dataclass(frozen=True)
class RunWorker:
    """A process that works at a run, or did until it died."""

    host: str
    pid: int
    alive: bool
    silent_seconds: float
    """Since its last heartbeat."""


@dataclass(frozen=True)
class RecentReward:
    """The mean reward of a run's newest finished groups; `mean` is None where none of them has a reward."""

    mean: float | None
    rewards: int
    rollouts: int
    groups: int


@dataclass(frozen=True)
class RunEntry:
    """A run as the list shows it."""

    id: int
    name: str
    purpose: str
    created_at: float
    state: State
    """working: a harness and, in a train run, a trainer work at it; waiting: one of them is missing.

    Where both are missing, the run has finished, was stopped, or was killed: the pool does not tell which.
    """
    harness: RunWorker | None
    trainer: RunWorker | None
    step: int | None
    """None: nothing is published."""
    version: str | None
    published_at: float | None
    paused: str
    """The rule that has paused it; "": none has."""
    alarms: list[str]
    """Rules in alarm after the newest step."""
    watched: list[str]
    """Rules that one more step may alarm."""
    advice: list[str]
    """Rules that advise after the newest step."""
    groups: int
    """Groups opened so far."""
    running: int
    """Groups whose rollouts run, counted up to COUNTED."""
    cut_off: int
    """Groups with rollouts that have no outcome and do not run, as no harness works at the run; up to COUNTED."""
    finished_at: float | None
    """When the newest finished group ended."""
    reward: RecentReward
    curve: list[tuple[int, float | None]]
    """The mean reward of some of its steps: (step, reward)."""


@dataclass(frozen=True)
class Alarm:
    """What alarms at a run that somebody works at."""

    name: str
    paused: str
    """The rule that has paused it; "": none has."""
    alarms: list[str]
    """Rules in alarm after the newest step."""


def runs_page(pool: Pool, before: int | None = None, limit: int = PAGE) -> list[RunEntry]:
    """Return the newest runs, or those older than the run with the id `before`."""
    query = select(runs).order_by(runs.c.id.desc()).limit(limit)
    if before is not None:
        query = query.where(runs.c.id < before)
    with snapshot(pool) as connection:
        now = database_time(connection, pool)
        return [_entry(connection, row, now) for row in connection.execute(query)]


def alarms(pool: Pool) -> list[Alarm]:
    """Return the alarms and pauses of runs that somebody works at, however old these are, newest first."""
    with snapshot(pool) as connection:
        now = database_time(connection, pool)
        rows = connection.execute(_worked_at()).all()
    found = []
    for row in rows:
        harness, trainer = worker(row.owner, row.owner_seen_at, now), worker(row.trainer, row.trainer_seen_at, now)
        loud = _in_alarm(_levels(row.states))
        if (is_there(harness) or is_there(trainer)) and (loud or row.paused):
            found.append((row.id, Alarm(row.name, row.paused or "", loud)))
    return [alarm for _, alarm in sorted(found, key=lambda each: -each[0])]


def _worked_at() -> Select[Any]:
    """Select the runs that have workers, those with the newest heartbeats, with the states of their rules."""
    newest = select(runs.c.id, runs.c.name, *WORKERS).order_by(runs.c.id.desc()).limit(WALK).subquery()
    of = newest.c
    seen = [
        case((who.is_not(None), func.coalesce(at, 0.0)), else_=0.0)
        for who, at in ((of.owner, of.owner_seen_at), (of.trainer, of.trainer_seen_at))
    ]
    last = case((seen[0] > seen[1], seen[0]), else_=seen[1])
    beaten = select(newest).where(last > 0).order_by(last.desc()).limit(MOST_WORKED_AT).subquery()
    mine = (policy_versions.c.run_id == beaten.c.id) & policy_versions.c.retired_at.is_(None)
    version = select(policy_versions.c.id).where(mine).order_by(policy_versions.c.step.desc()).limit(1)
    after = train_steps.c.version_id == version.correlate(beaten).scalar_subquery()
    states = select(train_steps.c.metrics[STATES]).where(after).correlate(beaten).scalar_subquery()
    paused = select(interventions.c.rule).where(is_paused(beaten.c.id)).limit(1).correlate(beaten).scalar_subquery()
    return select(beaten, states.label("states"), paused.label("paused"))


def run_names(pool: Pool, like: str = "", stepped: bool = False) -> list[str]:
    """Return the names of the newest runs that have this text in their names; `stepped`: with published weights."""
    query = select(runs.c.name).order_by(runs.c.id.desc()).limit(PAGE)
    if like:
        if "\0" in like:  # PostgreSQL does not even compare it
            return []
        query = query.where(runs.c.name.icontains(like, autoescape=True))
    if stepped:
        query = query.where(select(policy_versions.c.id).where(policy_versions.c.run_id == runs.c.id).exists())
    with snapshot(pool) as connection:
        return list(connection.scalars(query))


def run_entry(pool: Pool, name: str) -> RunEntry:
    """Return one run. NotInPool when there is none of this name."""
    with snapshot(pool) as connection:
        return _entry(connection, run_row(connection, name), database_time(connection, pool))


def run_row(connection: Connection, name: str) -> Row[Any]:
    """Return the row of a run. NotInPool when there is none of this name."""
    no_name = "\0" in name  # PostgreSQL does not even compare it
    row = None if no_name else connection.execute(select(runs).where(runs.c.name == name)).one_or_none()
    if row is None:
        raise NotInPool(f"the pool has no run {name!r}; the list of runs names those that it has")
    return row


def newest_group(connection: Connection, run_id: int) -> int:
    """Return how many groups a run has opened."""
    last = connection.scalar(select(func.max(groups.c.queue_index)).where(groups.c.run_id == run_id))
    return 0 if last is None else int(last) + 1


def counted(connection: Connection, run_id: int, state: str, purpose: str | None = None) -> int:
    """Count the groups of a run in one state, up to COUNTED of them; those queued for training, or of a purpose."""
    mine = (groups.c.run_id == run_id) & (groups.c.state == state)
    mine &= groups.c.purpose.is_(None) if purpose is None else groups.c.purpose == purpose
    some = select(groups.c.id).where(mine).limit(COUNTED).subquery()
    return int(connection.scalar(select(func.count()).select_from(some)) or 0)


def _entry(connection: Connection, row: Row[Any], now: float) -> RunEntry:
    version = current_version(connection, row.id)
    harness = worker(row.owner, row.owner_seen_at, now)
    trainer = worker(row.trainer, row.trainer_seen_at, now)
    unfinished = counted(connection, row.id, "RUNNING") + counted(connection, row.id, "RUNNING", "eval")
    paused = connection.scalar(select(interventions.c.rule).where(is_paused(row.id)).limit(1))
    levels = _levels(_states(connection, None if version is None else version.id))
    return RunEntry(
        id=row.id,
        name=row.name,
        purpose=row.purpose,
        created_at=row.created_at,
        state=_state(row.purpose, harness, trainer, bool(paused)),
        harness=harness,
        trainer=trainer,
        step=None if version is None else version.step,
        version=None if version is None else version_name(version.id),
        published_at=None if version is None else version.created_at,
        paused=paused or "",
        alarms=_in_alarm(levels),
        watched=[name for name, level in levels.items() if level == "watch" and name not in ADVICE],
        advice=[name for name, level in levels.items() if level == "alarm" and name in ADVICE],
        groups=newest_group(connection, row.id),
        running=unfinished if is_there(harness) else 0,
        cut_off=0 if is_there(harness) else unfinished,
        finished_at=connection.scalar(select(func.max(groups.c.finished_at)).where(groups.c.run_id == row.id)),
        reward=_recent(connection, row.id),
        curve=_curve(connection, row.id),
    )


def _state(purpose: str, harness: RunWorker | None, trainer: RunWorker | None, paused: bool) -> State:
    working = is_there(harness), is_there(trainer)
    if not any(working):
        return "nobody works at it"
    if paused:
        return "paused"
    return "working" if all(working) or purpose != "train" else "waiting"


def is_there(worker: RunWorker | None) -> bool:
    """Return whether a process works at a run."""
    return worker is not None and worker.alive


def worker(owner: Any, seen_at: float | None, now: float) -> RunWorker | None:
    """Return the process in a run's column `owner` or `trainer`, which may have died; None: it has given the run up."""
    if owner is None or seen_at is None:
        return None
    process, silent = msgspec.convert(owner, PoolProcess), now - seen_at
    return RunWorker(process.host, process.pid, is_alive(process, this_process(), silent), silent)


def _states(connection: Connection, version_id: int | None) -> Any:
    """Return what a step says of the monitor's rules."""
    mine = train_steps.c.version_id == version_id
    return connection.scalar(select(train_steps.c.metrics[STATES]).where(mine)) if version_id is not None else None


def _in_alarm(levels: Mapping[str, Any]) -> list[str]:
    return [name for name, level in levels.items() if level == "alarm" and name not in ADVICE]


def _levels(states: Any) -> dict[str, Any]:
    """Return the level of each rule."""
    return {name: each.get("level") for name, each in states.items()} if isinstance(states, dict) else {}


def _recent(connection: Connection, run_id: int) -> RecentReward:
    newest = (
        select(groups.c.id)
        .where(groups.c.run_id == run_id, groups.c.finished_at.is_not(None))
        .order_by(groups.c.finished_at.desc(), groups.c.id.desc())
        .limit(NEWEST_GROUPS)
        .subquery()
    )
    columns = (func.avg(rollouts.c.reward), func.count(rollouts.c.reward), func.count())
    joined = newest.join(rollouts, rollouts.c.group_id == newest.c.id)
    mean, rewards, members = connection.execute(select(*columns).select_from(joined)).one()
    count = connection.scalar(select(func.count()).select_from(newest)) or 0
    return RecentReward(None if mean is None else float(mean), int(rewards), int(members), int(count))


def _curve(connection: Connection, run_id: int) -> list[tuple[int, float | None]]:
    bounds = step_range(connection, run_id)
    if bounds is None:
        return []
    wanted = spread(max(1, bounds[0]), bounds[1], POINTS)
    reward = train_steps.c.metrics["reward_mean"]
    rows = of_steps(connection, run_id, wanted, (policy_versions.c.step, reward.label("reward")))
    return [(row.step, number(row.reward)) for row in rows]


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
