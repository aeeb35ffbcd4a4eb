"""The groups of a run in pages, and one group with its members side by side."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from proxy.pool.browse.runs import run_row
from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.errors import NotInPool, UserError
from proxy.pool.processes.owners import attended
from proxy.pool.rollouts.states import GROUP_STATES
from proxy.pool.schema import archives, attempts, groups, rollouts, runs, tasks

PAGE = 50
"""Groups of a page."""
WALK = 1000
"""Groups that a page with a filter looks at. Where fewer pass, the page is short and names the place to go on."""
OF_STEP = 4096
"""Groups of one train step that are looked at."""
MOST_MEMBERS = 256
"""Members of a group that are shown."""


@dataclass(frozen=True)
class GroupEntry:
    """A group as the list shows it."""

    id: int
    run: str
    queue_index: int
    task: str
    domain: str
    agent: str | None
    held_out: bool
    state: str
    cut_off: bool
    """It is RUNNING, but none of its rollouts runs, as no harness works at its run."""
    step: int | None
    reason: str | None
    detail: str | None
    failure: str | None
    size: int
    members: int
    finished: int
    rewards: list[float | None]
    """Rewards of its members in order; None: it has none (yet)."""
    created_at: float
    finished_at: float | None
    archive: str | None
    """The file that its completions have moved to; None: the pool has them."""


@dataclass(frozen=True)
class GroupsPage:
    """A page of groups, newest first."""

    groups: list[GroupEntry]
    before: int | None
    """Where the next page begins, to be given back; None: this was the last."""


@dataclass(frozen=True)
class Member:
    """A rollout of a group."""

    rollout_id: int
    member: int
    attempt_id: int | None
    """The attempt that gave its outcome, else its newest one; None: there is none."""
    attempts: int
    agent: str | None
    reward: float | None
    reward_parts: dict[str, Any]
    failure: str | None
    detail: str | None
    left_out: str | None
    hacked: str | None
    weight: float | None
    completions: int | None
    sampled_tokens: int | None
    trainable_tokens: int | None
    versions: list[str]
    opened_at: float | None
    closed_at: float | None
    finished_at: float | None


@dataclass(frozen=True)
class GroupView:
    """A group with its members."""

    group: GroupEntry
    instruction: str
    members: list[Member]
    replaces: int | None
    max_tokens: int | None


def groups_page(
    pool: Pool, name: str, before: int | None = None, state: str | None = None, step: int | None = None
) -> GroupsPage:
    """Return the newest groups of a run, or those behind the place `before`. UserError for an unknown run or state.

    `state`, `step`: only groups in this state, or of this train step.
    """
    if state is not None and state not in GROUP_STATES:
        raise UserError(f"{state!r} is no state of a group; choose one of: {', '.join(GROUP_STATES)}")
    with snapshot(pool) as connection:
        run = run_row(connection, name)
        source: Any = groups.c
        walk = select(source.id, source.queue_index, source.state).where(groups.c.run_id == run.id)
        if step is not None:  # limited, or SQLite would walk along all groups of the run for the order
            source = walk.where(groups.c.step == step).limit(OF_STEP).subquery().c
            walk = select(source.id, source.queue_index, source.state)
        if before is not None:
            walk = walk.where(source.queue_index < before)
        limit = PAGE + 1 if state is None else WALK
        seen = connection.execute(walk.order_by(source.queue_index.desc()).limit(limit)).all()
        chosen = [row for row in seen if state is None or row.state == state][:PAGE]
        full = len(chosen) == PAGE
        last = chosen[-1] if full else seen[-1] if seen else None
        further = last is not None and (len(seen) == limit or (full and last is not seen[-1]))
        page = _entries(connection, pool, [row.id for row in chosen])
    return GroupsPage(page, last.queue_index if further and last is not None else None)


def group_view(pool: Pool, group_id: int) -> GroupView:
    """Return a group with its members. NotInPool when there is none with this id."""
    with snapshot(pool) as connection:
        entries = _entries(connection, pool, [group_id])
        if not entries:
            raise NotInPool(f"the pool has no group {group_id}; the pages of its runs list those that it has")
        row = connection.execute(
            select(groups.c.replaces, groups.c.max_tokens, tasks.c.spec)
            .join_from(groups, tasks, tasks.c.id == groups.c.task_id)
            .where(groups.c.id == group_id)
        ).one()
        members = [_member(each) for each in connection.execute(_members(group_id))]
    instruction = str((row.spec or {}).get("instruction", ""))
    return GroupView(entries[0], instruction, members, row.replaces, row.max_tokens)


def _entries(connection: Connection, pool: Pool, ids: list[int]) -> list[GroupEntry]:
    """Return these groups, newest first."""
    query = (
        select(groups, runs.c.name.label("run"), tasks.c.name.label("task"), tasks.c.domain, archives.c.file)
        .join_from(groups, tasks, tasks.c.id == groups.c.task_id)
        .join(runs, runs.c.id == groups.c.run_id)
        .outerjoin(archives, archives.c.id == groups.c.archive_id)
        .where(groups.c.id.in_(ids))
        .order_by(groups.c.queue_index.desc())
    )
    members: dict[int, list[Row[Any]]] = {id: [] for id in ids}
    columns = (rollouts.c.group_id, rollouts.c.member, rollouts.c.reward, rollouts.c.finished_at)
    of_these: Any = select(*columns).where(rollouts.c.group_id.in_(ids))
    for row in connection.execute(of_these.order_by(rollouts.c.group_id, rollouts.c.member)):
        members[row.group_id].append(row)
    rows = connection.execute(query).all()
    unfinished = {row.run_id for row in rows if row.state == "RUNNING"}
    left = {run_id for run_id in unfinished if not attended(connection, pool, run_id)}
    return [_entry(row, members[row.id], row.run_id in left) for row in rows]


def _entry(row: Row[Any], members: list[Row[Any]], left: bool) -> GroupEntry:
    """Return a group as the list shows it. `left`: no harness works at its run."""
    return GroupEntry(
        id=row.id,
        run=row.run,
        queue_index=row.queue_index,
        task=row.task,
        domain=row.domain,
        agent=row.agent,
        held_out=row.purpose == "eval",
        state=row.state,
        cut_off=left and row.state == "RUNNING",
        step=row.step,
        reason=row.reason,
        detail=row.detail,
        failure=row.failure,
        size=row.size,
        members=len(members),
        finished=sum(each.finished_at is not None for each in members),
        rewards=[each.reward for each in members[:MOST_MEMBERS]],
        created_at=row.created_at,
        finished_at=row.finished_at,
        archive=row.file if row.dropped_at is not None else None,
    )


def _members(group_id: int) -> Any:
    of_rollout = attempts.c.rollout_id == rollouts.c.id
    newest = select(func.max(attempts.c.id)).where(of_rollout).correlate(rollouts).scalar_subquery()
    tries = select(func.count()).select_from(attempts).where(of_rollout).correlate(rollouts).scalar_subquery()
    shown = attempts.alias("shown")
    deciding = func.coalesce(rollouts.c.attempt_id, newest)
    return (
        select(rollouts, tries.label("tries"), shown.c.id.label("shown"), shown.c.agent)
        .add_columns(shown.c.opened_at, shown.c.closed_at, shown.c.sampled_tokens.label("attempt_tokens"))
        .outerjoin_from(rollouts, shown, shown.c.id == deciding)
        .where(rollouts.c.group_id == group_id)
        .order_by(rollouts.c.member)
        .limit(MOST_MEMBERS)
    )


def _member(row: Row[Any]) -> Member:
    return Member(
        rollout_id=row.id,
        member=row.member,
        attempt_id=row.shown,
        attempts=row.tries,
        agent=row.agent,
        reward=row.reward,
        reward_parts=row.reward_parts or {},
        failure=row.failure,
        detail=row.detail,
        left_out=row.left_out,
        hacked=row.hacked,
        weight=row.weight,
        completions=row.completions,
        sampled_tokens=row.attempt_tokens if row.sampled_tokens is None else row.sampled_tokens,
        trainable_tokens=row.trainable_tokens,
        versions=row.versions or [],
        opened_at=row.opened_at,
        closed_at=row.closed_at,
        finished_at=row.finished_at,
    )
