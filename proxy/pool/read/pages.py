"""Iterates over recorded rollouts in bounded memory: pages of groups, then the completions of one attempt at a time.

Each page and each attempt is a snapshot of its own, so that a long iteration neither holds back the database nor stops
when others write. A group that is opened meanwhile is read if the iteration has not passed its place.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Connection, Join, Row, Select, bindparam, func, select

from proxy.pool.completions.labels import LABELS
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import labelled, of_attempts, paths
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.read.archive_file import ArchiveFile
from proxy.pool.read.records import CompletionRecord, RolloutRecord
from proxy.pool.read.why_untrained import Surroundings, group_untrained, why_untrained
from proxy.pool.rollouts.masked import masked_as_hacked
from proxy.pool.rollouts.runs import find_run
from proxy.pool.rollouts.states import GROUP_STATES
from proxy.pool.schema import archives, attempts, groups, runs, tasks
from proxy.pool.schema import rollouts as rollouts_table
from proxy.pool.untrained import Untrained, UntrainedReason

PAGE = 32
"""Groups per query."""


@dataclass(frozen=True, kw_only=True)
class RolloutFilter:
    """Which rollouts are read: those for which everything that is set holds. Bounds are inclusive."""

    run: str | None = None
    state: str | None = None
    """State of the group: RUNNING | DONE | LEASED | CONSUMED | TOMBSTONE."""
    domain: str | None = None
    first_step: int | None = None
    last_step: int | None = None
    """Steps of the train steps that took the groups; groups without a step are left out where a bound is set."""
    min_reward: float | None = None
    max_reward: float | None = None
    """A rollout without a reward is left out where a bound is set."""
    labels: Collection[str] | None = None
    """Completions of these labels only; rollouts that have none of them are left out."""
    all_attempts: bool = False
    """Also attempts that are open or did not give their rollout its outcome."""
    archives: Path | None = None
    """Where the archive files are now, if they were moved since `proxy pool archive` wrote them."""

    def __post_init__(self) -> None:
        for value, known in ((self.state, GROUP_STATES), *((label, LABELS) for label in self.labels or ())):
            if value is not None and value not in known:
                raise UserError(f"{value!r} is unknown; choose one of: {', '.join(known)}")

    def groups_query(self, run_id: int) -> Select[Any]:
        """Return the query of the groups of a run that pass, in queue order.

        The conditions are expressions that no index serves, so that a page is a walk along (run_id, queue_index). With
        an index of the state, a database would sort all groups of that state for each page.
        """
        columns = (groups.c.id, groups.c.queue_index, groups.c.state, groups.c.step, groups.c.reason, groups.c.detail)
        query = (
            select(
                *columns,
                groups.c.function,
                groups.c.agent,
                groups.c.start_dated_at,
                groups.c.purpose,
                tasks.c.name.label("task"),
                tasks.c.domain,
            )
            .join_from(groups, tasks, tasks.c.id == groups.c.task_id)
            .where(groups.c.run_id == run_id)
            .order_by(groups.c.queue_index)
        )
        if self.state is not None:
            query = query.where(groups.c.state + "" == self.state)
        if self.domain is not None:
            query = query.where(tasks.c.domain + "" == self.domain)
        if self.first_step is not None:
            query = query.where(groups.c.step + 0 >= self.first_step)
        if self.last_step is not None:
            query = query.where(groups.c.step + 0 <= self.last_step)
        return query


def _within(value: float | None, least: float | None, most: float | None) -> bool:
    if value is None:
        return least is None and most is None
    return (least is None or value >= least) and (most is None or value <= most)


ALL = RolloutFilter()


def rollouts(source: Pool | str | Path, which: RolloutFilter = ALL) -> Iterator[RolloutRecord]:
    """Yield the rollouts of a pool (or of the pool at this file or URL) run by run, in queue order.

    Those whose completions have left the pool are read from their archive, in the same order.

    A finished rollout comes once, with the attempt that gave its outcome; with `all_attempts` every attempt comes.
    Raises UserError when there is no such pool or run, or when stored tokens do not match their checksum.
    """
    pool = source if isinstance(source, Pool) else open_pool(str(source), create=False)
    stored = _Stored(pool, which.archives)
    try:
        for run in _runs(pool, which):
            for group, row in _attempts(pool, run.id, which):
                reward = row.reward if _is_final(row) else None
                if _within(reward, which.min_reward, which.max_reward):  # before any token is read
                    rollout = _record(run.name, group, row, _completions(stored, run, group, row, which))
                    if which.labels is None or rollout.completions:
                        yield rollout
    finally:
        if pool is not source:
            pool.close()


def _runs(pool: Pool, which: RolloutFilter) -> Collection[Any]:
    if which.run is not None:
        return [find_run(pool, which.run)]
    with pool.read() as connection:
        return connection.execute(select(runs.c.id, runs.c.name, runs.c.purpose).order_by(runs.c.id)).all()


def _attempts(pool: Pool, run_id: int, which: RolloutFilter) -> Iterator[tuple[Row[Any], Row[Any]]]:
    """Yield each attempt that may pass, as the rows of its group and its rollout."""
    following = which.groups_query(run_id).where(groups.c.queue_index > bindparam("last")).limit(PAGE)
    last = -1
    while True:
        with pool.read() as connection:
            page = connection.execute(following, {"last": last}).all()
            rows = _of_groups(connection, [group.id for group in page], which.all_attempts)
        for group in page:
            yield from ((group, row) for row in rows if row.group_id == group.id)
        if len(page) < PAGE:
            return
        last = page[-1].queue_index


def _of_groups(connection: Connection, group_ids: list[int], all_attempts: bool) -> list[Row[Any]]:
    """Return the rollouts of these groups with their attempts; finished ones with the final attempt alone."""
    newest = func.max(attempts.c.id).over(partition_by=rollouts_table.c.id).label("newest")
    query = (
        select(
            rollouts_table,
            attempts.c.id.label("attempt"),
            attempts.c.agent,
            attempts.c.opened_at,
            attempts.c.closed_at,
            newest,
        )
        .select_from(_tried(all_attempts))
        .where(rollouts_table.c.group_id.in_(group_ids), *_ended(all_attempts))
        .order_by(rollouts_table.c.group_id, rollouts_table.c.member, attempts.c.id)
    )
    return list(connection.execute(query))


def _tried(all_attempts: bool) -> Join:
    """Rollouts with their attempts, or with the final one alone."""
    joined = attempts.c.rollout_id == rollouts_table.c.id
    if not all_attempts:
        joined &= attempts.c.id == rollouts_table.c.attempt_id
    return rollouts_table.outerjoin(attempts, joined)


def _ended(all_attempts: bool) -> list[ColumnElement[bool]]:
    return [] if all_attempts else [rollouts_table.c.finished_at.is_not(None)]


def count(pool: Pool, which: RolloutFilter) -> int:
    """Return how many rollouts `rollouts` will yield at most: bounds of rewards and labels are not counted."""
    number = select(func.count()).select_from(_tried(which.all_attempts)).where(*_ended(which.all_attempts))
    total = 0
    for run in _runs(pool, which):
        passing = which.groups_query(run.id).with_only_columns(groups.c.id).order_by(None)
        with pool.read() as connection:
            total += connection.scalar(number.where(rollouts_table.c.group_id.in_(passing))) or 0
    return total


class _Stored:
    """Finds the completions of an attempt: in the pool, or in the archive of its group."""

    def __init__(self, pool: Pool, moved: Path | None):
        self._pool = pool
        self._moved = moved
        self._archive: tuple[int, ArchiveFile] | None = None

    def of_attempt(self, group_id: int, attempt_id: int) -> list[Completion]:
        """Return the completions of an attempt. Raises UserError when its archive cannot be read."""
        query = select(archives.c.id, archives.c.file).join_from(groups, archives, archives.c.id == groups.c.archive_id)
        with self._pool.read() as connection:  # one snapshot, as the group may be dropped at any time
            dropped = query.where(groups.c.id == group_id, groups.c.dropped_at.is_not(None))
            row = connection.execute(dropped).one_or_none()
            if row is None:
                return of_attempts(connection, [attempt_id], experts=False)[attempt_id]
        if self._archive is None or self._archive[0] != row.id:
            file = Path(row.file)
            self._archive = row.id, ArchiveFile(self._moved / file.name if self._moved else file)
        return self._archive[1].of_attempt(attempt_id)


def _completions(
    stored: _Stored, run: Any, group: Row[Any], row: Row[Any], which: RolloutFilter
) -> Iterator[CompletionRecord]:
    """Yield the completions of an attempt that have one of the wanted labels."""
    if row.attempt is None:
        return
    chain = labelled(stored.of_attempt(group.id, row.attempt))
    try:
        whole = paths(chain)
    except (ValueError, KeyError) as error:
        raise UserError(
            f"attempt {row.attempt} of run {run.name!r} is damaged ({error}); run `proxy pool verify`"
        ) from error
    ended_without_outcome = row.finished_at is None and row.closed_at is not None
    around = Surroundings(
        retried=ended_without_outcome or row.attempt != (row.attempt_id or row.newest),
        without_reward=row.finished_at is not None and row.reward is None,
        failure=row.failure,
        hacked=masked_as_hacked(row.hacked, row.integrity),
        set_aside=row.set_aside,
        group=group_untrained(group.purpose or run.purpose, group.reason, group.detail),
    )
    for item in chain:
        if which.labels is None or item.label in which.labels:
            own = item.untrainable
            if own is None and item.id in (row.completions_left_out or ()):
                own = Untrained(UntrainedReason.FUNCTION, group.function or "")
            yield _completion(item, whole[item.id], why_untrained(own, item.label, around))


def _completion(item: Completion, tokens: Any, untrained: Untrained | None) -> CompletionRecord:
    return CompletionRecord(
        id=item.id,
        ordinal=item.ordinal,
        label=item.label,
        follows=item.follows,
        prefix_of=item.prefix_of,
        prefix_length=item.prefix_length,
        message=item.reply,
        finish_reason=item.finish_reason,
        tokens=tokens,
        prompt_length=item.prompt_length,
        given=tuple((item.prompt_length + start, item.prompt_length + end) for start, end in item.given),
        logprobs=item.logprobs,
        versions=item.versions,
        untrainable=item.untrainable,
        untrained=untrained,
        misfit=item.misfit,
        started_at=item.started_at,
        finished_at=item.finished_at,
        observed=item.observed,
    )


def _is_final(row: Row[Any]) -> bool:
    return row.finished_at is not None and row.attempt_id == row.attempt


def _record(run: str, group: Row[Any], row: Row[Any], completions: Iterator[CompletionRecord]) -> RolloutRecord:
    final = _is_final(row)
    return RolloutRecord(
        run=run,
        task=group.task,
        domain=group.domain,
        group=group.queue_index,
        group_state=group.state,
        step=group.step,
        rollout=row.id,
        member=row.member,
        attempt=row.attempt,
        agent=row.agent or group.agent,
        dated_at=group.start_dated_at or row.opened_at,
        closed_at=row.closed_at,
        final=final,
        reward=row.reward if final else None,
        reward_parts=row.reward_parts if final else None,
        failure=row.failure if final else None,
        weight=row.weight if final else None,
        hacked=row.hacked if final else None,
        completions=tuple(completions),
    )
