"""Groups of rollouts of one task: RUNNING, then DONE or TOMBSTONE; the scheduler takes them from there.

A group becomes DONE when every rollout has its outcome and enough of them have a reward; otherwise it becomes a
TOMBSTONE, which the queue skips (proxy/pool/rollouts/failures.py: enough_valid).

A group of size G may have R redundant members: when G rollouts have a reward, the others are cancelled and only those
G count. This favours short rollouts, so R is 0 by default (docs/runs.md).
"""

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import Connection, Integer, bindparam, func, insert, select, update

from proxy.pool.database import Pool, insert_row, retried
from proxy.pool.rollouts.counts import final_counts
from proxy.pool.rollouts.failures import FAILURES, enough_valid, treatment
from proxy.pool.rollouts.runs import lock_run
from proxy.pool.rollouts.starts import START, Start, start_of
from proxy.pool.rollouts.states import GroupState, move
from proxy.pool.schema import SAMPLED_TOKENS, attempts, completions, groups, interventions, rollouts, tasks
from proxy.pool.untrained import UntrainedReason


@dataclass(frozen=True)
class OpenRollout:
    """A rollout without an outcome, and its task."""

    rollout_id: int
    group_id: int
    member: int
    task: dict[str, Any]
    agent: str | None = None
    """The agent of its group; None where the run has only one."""
    max_tokens: int | None = None
    """Tokens that an attempt may sample, by its group; None: its group sets no limit."""
    start: Start | None = None
    """The recorded attempt that its attempts begin with."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Settings of a group besides its task and size."""

    redundant: int = 0
    """Members beyond the size; the last ones to finish are cancelled."""
    agent: str | None = None
    held_out: bool = False
    """For evaluation only: recorded, never queued for a trainer."""
    replaces: int | None = None
    """Id of the first group of the chain that this one replaces."""
    place: int | None = None
    """The place of its task in the line of its source, where settled tasks are skipped (harness/tasks/mix.py)."""
    max_tokens: int | None = None
    """Tokens that each of its attempts may sample, if lower than the task's limit."""
    start: Start | None = None
    """The recorded attempt that its attempts begin with; the same for all, since their rewards are compared."""


DEFAULTS = GroupOptions()
# Built once, as CALLS_SEEN in proxy/pool/rollouts/budgets.py is. `of`: the id of the row that is asked for.
_of = bindparam("of", type_=Integer)
_rule = select(interventions.c.rule).where(interventions.c.task_id == tasks.c.id).correlate(tasks).limit(1)
TASK = select(tasks.c.id, _rule.scalar_subquery().label("rule")).where(
    tasks.c.run_id == _of, tasks.c.name == bindparam("name")
)
"""A task of a run by its name, and the rule of the monitor that has dropped it."""
LAST_PLACES = select(
    *(
        func.coalesce(select(func.max(place)).where(groups.c.run_id == _of).scalar_subquery(), -1).label(place.name)
        for place in (groups.c.queue_index, groups.c.position)  # one by one, as SQLite then reads no more than a row
    )
)
"""The last places of a run's queue; -1 where there is none."""
INSERT_MEMBERS = insert(rollouts).returning(rollouts.c.id, sort_by_parameter_order=True)
GROUP_OF = select(groups.c.id, groups.c.run_id).join_from(rollouts, groups).where(rollouts.c.id == _of)
FINISH = update(rollouts).where(rollouts.c.id == _of, rollouts.c.finished_at.is_(None))
PROGRESS = (
    select(groups.c.size, func.count(rollouts.c.reward), func.count() - func.count(rollouts.c.finished_at))
    .join_from(rollouts, groups)
    .where(groups.c.id == _of)
    .group_by(groups.c.size)
)
"""The size of a group, and how many of its rollouts have a reward and no outcome."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a rollout. A missing reward is None, never 0."""

    attempt_id: int | None
    reward: float | None
    failure: str | None = None
    detail: str = ""
    reward_parts: dict[str, float] = field(default_factory=dict)
    hacked: str | None = None
    """It cheated, and what becomes of it: tell, mask (never trained) or zero (`reward` is 0). None: it did not."""
    integrity: dict[str, Any] | None = None
    """What detectors and a judge found (harness/integrity), with the reward before. None: nobody looked."""
    replaced: Any = None
    """The verifier's outcome, where a scorer replaced it (proxy/pool/rollouts/scoring.py); None: it did not."""


@dataclass(frozen=True)
class GroupProgress:
    """The state of a group after the outcome of one of its rollouts."""

    group_id: int
    state: str
    """RUNNING while other members have no outcome."""
    failure: str | None
    """The kind of failure that the group is lost to; None: it is not lost."""
    cancelled: tuple[int, ...] = ()
    """Rollouts that need not go on, by id."""


@dataclass(frozen=True)
class RolloutRow:
    """One rollout as tables and results.jsonl show it. Counts and seconds are those of its last attempt."""

    rollout: int
    """Its id in the pool."""
    task: str
    group: int
    member: int
    agent: str | None
    reward: float | None
    failure: str | None
    detail: str | None
    finished: bool
    attempts: int
    completions: int
    trainable: int
    sampled_tokens: int
    seconds: float | None
    hacked: str | None = None
    """tell | mask | zero: it cheated, and what becomes of it."""


@retried
def open_group(
    pool: Pool, run_id: int, task: dict[str, Any], size: int, options: GroupOptions = DEFAULTS
) -> list[OpenRollout]:
    """Append a group of `size` rollouts of a task to the run's queue, in state RUNNING.

    A group of a task that the monitor has dropped has no rollouts and is a TOMBSTONE: it takes its turn and no more.
    """
    members = size + options.redundant
    with pool.write() as connection:
        lock_run(connection, run_id)
        task_id, rule = _task(connection, run_id, task)
        last = connection.execute(LAST_PLACES, {"of": run_id}).one()
        values: dict[str, Any] = {
            "run_id": run_id,
            "queue_index": last.queue_index + 1,
            "position": None if options.held_out else last.position + 1,
            "task_id": task_id,
            "size": size,
            "state": "RUNNING",
            "created_at": time.time(),
            "agent": options.agent,
            "purpose": "eval" if options.held_out else None,
            "replaces": options.replaces,
            "place": options.place,
            "max_tokens": options.max_tokens,
        }
        if options.start is not None:
            values |= {f"start_{name}": value for name, value in asdict(options.start).items()}
        if rule is not None and not options.held_out:
            dropped = {"reason": UntrainedReason.DISCARDED, "detail": rule, "finished_at": values["created_at"]}
            insert_row(connection, groups, values | {"state": "TOMBSTONE"} | dropped)
            return []
        group_id = insert_row(connection, groups, values)
        rows = [{"group_id": group_id, "member": member} for member in range(members)]
        ids = connection.scalars(INSERT_MEMBERS, rows).all()
    of_group = options.agent, options.max_tokens, options.start
    return [OpenRollout(id, group_id, member, task, *of_group) for member, id in enumerate(ids)]


def _task(connection: Connection, run_id: int, task: dict[str, Any]) -> tuple[int, str | None]:
    """Return a task's id, and the rule of the monitor that has dropped it; None: it is not dropped."""
    row = connection.execute(TASK, {"of": run_id, "name": task["id"]}).one_or_none()
    if row is not None:
        return row.id, row.rule
    values = {"run_id": run_id, "name": task["id"], "domain": task.get("domain", "agent"), "spec": task}
    return insert_row(connection, tasks, values), None


def dropped_tasks(pool: Pool, run_id: int) -> set[str]:
    """Return the names of the tasks that the monitor of a run has dropped."""
    query = select(tasks.c.name).join_from(interventions, tasks).where(interventions.c.run_id == run_id)
    with pool.read() as connection:
        return set(connection.scalars(query))


def called_off(pool: Pool, rollout_ids: Collection[int]) -> list[int]:
    """Return those of these rollouts that were cancelled because their task was dropped."""
    query = select(rollouts.c.id).where(rollouts.c.id.in_(rollout_ids), rollouts.c.failure == "called_off")
    with pool.read() as connection:
        return list(connection.scalars(query))


def open_rollouts(pool: Pool, run_id: int) -> list[OpenRollout]:
    """Return the run's rollouts without an outcome, in queue order. A resumed run starts with them."""
    own = (rollouts.c.id, rollouts.c.group_id, rollouts.c.member)
    query = (
        select(*own, tasks.c.spec, groups.c.agent, groups.c.max_tokens, *START)
        .join_from(rollouts, groups)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .where(groups.c.run_id == run_id, groups.c.state == "RUNNING", rollouts.c.finished_at.is_(None))
    )
    with pool.read() as connection:
        # Sorted here: for an order by index SQLite would read all groups of the run. Groups have rising ids.
        opened = [
            OpenRollout(row.id, row.group_id, row.member, row.spec, row.agent, row.max_tokens, start_of(row))
            for row in connection.execute(query)
        ]
    return sorted(opened, key=lambda rollout: (rollout.group_id, rollout.member))


@retried
def finish_rollout(pool: Pool, rollout_id: int, outcome: Outcome) -> GroupProgress:
    """Store a rollout's outcome and update its group. Only the first outcome counts."""
    values = {
        "attempt_id": outcome.attempt_id,
        "reward": outcome.reward,
        "reward_parts": outcome.reward_parts,
        "replaced": None if outcome.replaced is None else [outcome.replaced],
        "failure": outcome.failure,
        "detail": outcome.detail,
        "finished_at": time.time(),
        "hacked": outcome.hacked,
        "integrity": outcome.integrity,
    }
    with pool.write() as connection:
        group = connection.execute(GROUP_OF, {"of": rollout_id}).one()
        # Locked, or two last members that finish at once would each see the other unfinished and nobody would close
        # the group; and a lease must see all of a group's outcomes or none of the last one's effects.
        lock_run(connection, group.run_id)
        this = rollouts.c.id == rollout_id
        counts = final_counts(connection, outcome.attempt_id)
        values |= counts
        if connection.execute(FINISH, values | {"of": rollout_id}).rowcount:
            return _follow_up(connection, group.id, outcome)
        # It was cancelled while it finished: keep its result, which does not count.
        late = {"attempt_id": outcome.attempt_id, "reward_parts": outcome.reward_parts, **counts}
        connection.execute(update(rollouts).where(this, rollouts.c.attempt_id.is_(None)).values(late))
        row = connection.execute(select(groups.c.state, groups.c.failure).where(groups.c.id == group.id)).one()
        return GroupProgress(group.id, row.state, row.failure)


def _follow_up(connection: Connection, group_id: int, outcome: Outcome) -> GroupProgress:
    """Cancel members that are not needed any more; close the group when no member is left."""
    size, valid, left = connection.execute(PROGRESS, {"of": group_id}).one()
    cancelled: tuple[int, ...] = ()
    filtered = outcome.failure is not None and treatment(outcome.failure) == "filter"
    if left and (filtered or valid >= size):
        cancelled = _cancel_rest(connection, group_id, "filtered" if filtered else "redundant")
    elif left:
        return GroupProgress(group_id, "RUNNING", None)
    state: GroupState = "DONE"
    values: dict[str, Any] = {"finished_at": time.time()}
    if filtered:
        state = "TOMBSTONE"
        values |= {"failure": outcome.failure, "reason": UntrainedReason.GROUP_FILTERED, "detail": outcome.failure}
    elif not enough_valid(valid, size):
        state = "TOMBSTONE"
        why = {"reason": UntrainedReason.TOO_FEW_VALID, "detail": f"{valid} of {size} rollouts have a reward"}
        values |= {"failure": _most_frequent(connection, group_id), **why}
    move(connection, groups.c.id == group_id, "RUNNING", state, **values)
    return GroupProgress(group_id, state, values.get("failure"), cancelled)


def _cancel_rest(connection: Connection, group_id: int, kind: str) -> tuple[int, ...]:
    """Finish the members without an outcome as a failure of this kind; return their ids."""
    unfinished = (rollouts.c.group_id == group_id) & rollouts.c.finished_at.is_(None)
    ids = tuple(connection.scalars(select(rollouts.c.id).where(unfinished).order_by(rollouts.c.id)))
    values = {"failure": kind, "detail": FAILURES[kind].text, "finished_at": time.time()}
    connection.execute(update(rollouts).where(rollouts.c.id.in_(ids)).values(values))
    return ids


def _most_frequent(connection: Connection, group_id: int) -> str:
    without = (rollouts.c.group_id == group_id) & rollouts.c.reward.is_(None)
    kinds = Counter(connection.scalars(select(rollouts.c.failure).where(without).order_by(rollouts.c.member)))
    return kinds.most_common(1)[0][0] or "no reward"


def run_summary(pool: Pool, run_id: int) -> list[RolloutRow]:
    """Return every rollout of a run in queue order, with the counts of its last attempt."""
    newest = (
        select(attempts.c.rollout_id, func.max(attempts.c.id).label("id"), func.count().label("tries"))
        .where(attempts.c.run_id == run_id)
        .group_by(attempts.c.rollout_id)
        .subquery()
    )
    counts = (
        select(
            completions.c.attempt_id,
            func.count().label("total"),
            func.count().filter(completions.c.untrainable.is_(None)).label("trainable"),
            func.sum(SAMPLED_TOKENS).label("tokens"),
        )
        .group_by(completions.c.attempt_id)
        .subquery()
    )
    query = (
        select(
            rollouts.c.id,
            tasks.c.name,
            groups.c.queue_index,
            rollouts.c.member,
            func.coalesce(groups.c.agent, attempts.c.agent),
            rollouts.c.reward,
            rollouts.c.failure,
            rollouts.c.detail,
            rollouts.c.finished_at.is_not(None),
            func.coalesce(newest.c.tries, 0),
            func.coalesce(counts.c.total, 0),
            func.coalesce(counts.c.trainable, 0),
            func.coalesce(counts.c.tokens, 0),
            attempts.c.closed_at - attempts.c.opened_at,
            rollouts.c.hacked,
        )
        .join_from(rollouts, groups)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .outerjoin(newest, newest.c.rollout_id == rollouts.c.id)
        .outerjoin(attempts, attempts.c.id == newest.c.id)
        .outerjoin(counts, counts.c.attempt_id == newest.c.id)
        .where(groups.c.run_id == run_id)
        .order_by(groups.c.queue_index, rollouts.c.member)
    )
    with pool.read() as connection:
        return [RolloutRow(*row) for row in connection.execute(query)]
