"""Recorded attempts that others begin with (IPA's chunk-initialised resampling, arXiv 2512.24873 section 3.2).

The attempts of a group may begin with the first turns of a recorded attempt: the proxy replays them (proxy/replay), so
that the agent itself brings its sandbox there, and samples from then on. A turn is a whole answer to the agent's work;
side calls come along, but are not counted. Left out: which recorded attempt a group gets, and how many of its turns
(harness/anchors.py).
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select, update

from proxy.pool.completions.labels import SIDE
from proxy.pool.completions.records import SERVED_FINISH_REASONS, Completion
from proxy.pool.database import Pool, retried
from proxy.pool.rollouts.masked import MASKED
from proxy.pool.schema import TOKENS, attempts, completions, groups, rollouts, runs, tasks
from proxy.pool.untrained import Untrained, UntrainedReason

SUCCESS = 1.0
"""Reward from which a rollout counts as successful: verifiers give 1 for a solved task."""
START = (groups.c.start_attempt_id, groups.c.start_turns, groups.c.start_dated_at)
"""The columns of a group that `start_of` reads."""


@dataclass(frozen=True)
class Start:
    """The recorded attempt that an attempt begins with."""

    attempt_id: int
    turns: int
    """How many of its turns are replayed."""
    dated_at: float
    """Unix time that chat templates read, in the recorded attempt and in this one."""


@dataclass(frozen=True)
class RecordedSuccess:
    """A recorded attempt that solved its task."""

    attempt_id: int
    turns: int
    """All of its turns: IPA's chunks 1..n."""
    dated_at: float


@dataclass(frozen=True)
class Replayed:
    """How far an attempt has replayed the recorded one."""

    differed: str | None
    """The first request that differs, and how."""
    completions: Mapping[int, int]
    """Completion of this attempt -> the recorded completion whose answer it has."""


def is_turn(item: Completion) -> bool:
    """Whether a recorded completion is a turn that can be replayed."""
    return item.label != SIDE and is_whole(item)


def is_whole(item: Completion) -> bool:
    """Whether a recorded completion is a whole answer, in tokens, that its client got."""
    lost = item.untrainable is not None and item.untrainable.reason == UntrainedReason.ABANDONED
    return item.finish_reason in SERVED_FINISH_REASONS and bool(item.sampled) and not lost


def _turn() -> ColumnElement[bool]:
    """`is_turn` in SQL."""
    return and_(
        or_(completions.c.label.is_(None), completions.c.label != SIDE),
        completions.c.finish_reason.in_(SERVED_FINISH_REASONS),
        TOKENS > 0,
        or_(completions.c.untrainable.is_(None), completions.c.untrainable != UntrainedReason.ABANDONED),
    )


def _solved() -> ColumnElement[bool]:
    """Whether the rollout of a query's row solved its task by itself, and is still in the pool."""
    whole = func.coalesce(groups.c.start_turns, 0) == 0
    return and_(rollouts.c.reward >= SUCCESS, ~MASKED, groups.c.dropped_at.is_(None), whole)


def successes(pool: Pool, run: str, task: str, agent: str | None) -> list[RecordedSuccess]:
    """Return the attempts of a run of the pool that solved a task with this agent, in the order of their numbers.

    Left out: attempts in an environment that was varied, rollouts that cheated or are not in the pool any more, those
    that replayed turns themselves, and attempts of a single turn, since nothing of them can be replayed.
    """
    turns = select(func.count()).where(completions.c.attempt_id == attempts.c.id, _turn()).scalar_subquery()
    dated_at = func.coalesce(groups.c.start_dated_at, attempts.c.opened_at)
    query = (
        select(attempts.c.id, turns.label("turns"), dated_at.label("dated_at"), attempts.c.augmentation)
        .join_from(runs, tasks, tasks.c.run_id == runs.c.id)
        .join(groups, groups.c.task_id == tasks.c.id)
        .join(rollouts, rollouts.c.group_id == groups.c.id)
        .join(attempts, attempts.c.id == rollouts.c.attempt_id)
        .where(runs.c.name == run, tasks.c.name == task, _solved())
    )
    if agent is not None:
        query = query.where(attempts.c.agent == agent)
    with pool.read() as connection:
        rows = connection.execute(query.order_by(attempts.c.id)).all()
    return [RecordedSuccess(row.id, row.turns, row.dated_at) for row in rows if row.turns > 1 and not row.augmentation]


def solved_tasks(pool: Pool, run: str) -> set[str]:
    """Return the names of the tasks that a run of the pool has solved."""
    query = (
        select(tasks.c.name)
        .join_from(runs, tasks, tasks.c.run_id == runs.c.id)
        .join(groups, groups.c.task_id == tasks.c.id)
        .join(rollouts, rollouts.c.group_id == groups.c.id)
        .where(runs.c.name == run, _solved())
    )
    with pool.read() as connection:
        return set(connection.scalars(query.distinct()))


def outcomes(pool: Pool, run_id: int, attempt_ids: Collection[int]) -> dict[int, dict[int, list[bool]]]:
    """Return, for recorded attempts and each number of their turns that groups of the run have begun with, whether the
    finished rollouts of these groups succeeded, oldest first. Rollouts without a reward are left out."""
    query = (
        select(groups.c.start_attempt_id, groups.c.start_turns, rollouts.c.reward)
        .join_from(groups, rollouts)
        .where(groups.c.run_id == run_id, groups.c.start_attempt_id.in_(attempt_ids))
        .where(rollouts.c.reward.is_not(None), ~MASKED)
        .order_by(rollouts.c.id)
    )
    found: dict[int, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    with pool.read() as connection:
        for attempt_id, turns, reward in connection.execute(query):
            found[attempt_id][turns].append(reward >= SUCCESS)
    return found


def replayed(pool: Pool, attempt_id: int) -> Replayed:
    """Return how far an attempt has replayed the recorded one."""
    rows = select(completions.c.id, completions.c.untrainable_detail).where(
        completions.c.attempt_id == attempt_id, completions.c.untrainable == UntrainedReason.REPLAYED
    )
    with pool.read() as connection:
        differed = connection.scalar(select(attempts.c.differed).where(attempts.c.id == attempt_id))
        return Replayed(differed, {id: int(recorded) for id, recorded in connection.execute(rows)})


def as_replayed(recorded_id: int) -> Untrained:
    """Return why a completion with a recorded answer is not trained. `replayed` reads the number again."""
    return Untrained(UntrainedReason.REPLAYED, str(recorded_id))


@retried
def note_differed(pool: Pool, attempt_id: int, how: str) -> None:
    """Record that an attempt has left the recorded one; the first time counts."""
    first = (attempts.c.id == attempt_id) & attempts.c.differed.is_(None)
    with pool.write() as connection:
        connection.execute(update(attempts).where(first).values(differed=how))


def left_replay(pool: Pool, attempt_id: int, start: Start) -> str | None:
    """Return how an attempt that has ended left the recorded one before the turns were over; None: it did not."""
    now = replayed(pool, attempt_id)
    if now.differed is not None:
        return now.differed
    recorded = select(func.count()).where(completions.c.id.in_(set(now.completions.values())), _turn())
    with pool.read() as connection:
        turns = connection.scalar(recorded) or 0
    if turns >= start.turns:
        return None
    return f"the agent ended after {turns} of the {start.turns} turns of attempt {start.attempt_id}"


def start_of(row: Any) -> Start | None:
    """Return the start of a group from its columns."""
    if row.start_attempt_id is None:
        return None
    return Start(row.start_attempt_id, row.start_turns, row.start_dated_at)
