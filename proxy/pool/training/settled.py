"""Kept sums, from which the account is made without reading all groups of a run.

A group settles when nothing can move its tokens but a rollback: it is CONSUMED, a TOMBSTONE, or done where no step
will take it, and all of its attempts are closed. Publishing a step settles what has come to that. A rollback takes the
groups that it reopens out of the sums again. In runs that nobody trains from, the harness settles what has ended.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from sqlalchemy import ColumnElement, Connection, exists, null, select, update

from proxy.pool.completions.store import IDS_PER_QUERY
from proxy.pool.database import Pool, retried
from proxy.pool.rollouts.runs import current_version, lock_run
from proxy.pool.schema import attempts, groups, policy_versions, rollouts, runs, train_steps
from proxy.pool.training.fates import StepSums, Tally, added
from proxy.pool.training.places import tallies
from proxy.pool.untrained import heading

UNSETTLED = groups.c.settled.is_(None)


def settle(connection: Connection, run_id: int) -> int:
    """Add groups that have come to rest to the sums of their run, which the caller has locked; return their number.

    At most IDS_PER_QUERY of them, so that the first step of an old pool does not take a minute.
    """
    members = rollouts.c.group_id == groups.c.id
    unfinished = exists().where(members, rollouts.c.finished_at.is_(None))
    closing = exists().where(members, attempts.c.rollout_id == rollouts.c.id, attempts.c.closed_at.is_(None))
    untaken = groups.c.purpose.is_not(None) | (runs.c.purpose != "train")
    over = groups.c.state.in_(("CONSUMED", "TOMBSTONE")) | (untaken & (groups.c.state == "DONE"))
    at_rest = (groups.c.run_id == run_id) & UNSETTLED & over & ~unfinished & ~closing
    query = select(groups.c.id).join_from(groups, runs).where(at_rest)
    ids = connection.scalars(query.limit(IDS_PER_QUERY)).all()
    _change(connection, run_id, ids, settled=True)
    return len(ids)


def settle_untrained(pool: Pool, run_id: int) -> None:
    """Settle the groups of a run that have come to rest; of a train run none, as its steps do that."""
    while _settle_some(pool, run_id) == IDS_PER_QUERY:
        pass


@retried
def _settle_some(pool: Pool, run_id: int) -> int:
    with pool.write() as connection:
        lock_run(connection, run_id)
        purpose = connection.scalar(select(runs.c.purpose).where(runs.c.id == run_id))
        return 0 if purpose == "train" else settle(connection, run_id)


def unsettle(connection: Connection, run_id: int, which: ColumnElement[bool]) -> None:
    """Take groups out of the sums before they are reopened."""
    query = select(groups.c.id).where(groups.c.run_id == run_id, which, ~UNSETTLED)
    ids = connection.scalars(query).all()
    for start in range(0, len(ids), IDS_PER_QUERY):
        _change(connection, run_id, ids[start : start + IDS_PER_QUERY], settled=False)


def _change(connection: Connection, run_id: int, ids: Sequence[int], settled: bool) -> None:
    if not ids:
        return
    some = groups.c.id.in_(ids)
    change = tallies(connection, run_id, some)
    if not settled:
        change = {place: Tally() - tally for place, tally in change.items()}
    keep(connection, run_id, added(kept(connection, run_id), change))
    connection.execute(update(groups).where(some).values(settled=1 if settled else null()))


def keep(connection: Connection, run_id: int, sums: Mapping[str, Tally]) -> None:
    """Write the sums of a run's settled groups."""
    stored = {place: [t.groups, t.rollouts, t.tokens] for place, t in sums.items() if t != Tally()}
    connection.execute(update(runs).where(runs.c.id == run_id).values(settled=stored))


def kept(connection: Connection, run_id: int) -> Mapping[str, Tally]:
    """Return the sums of a run's settled groups, by place."""
    stored = connection.scalar(select(runs.c.settled).where(runs.c.id == run_id)) or {}
    return {place: Tally(*counts) for place, counts in msgspec.convert(stored, dict[str, list[int]]).items()}


def of_steps(connection: Connection, run_id: int) -> StepSums:
    """Return the sums of all steps of a run that count: those of its newest version's row, or of all rows before it."""
    newest = current_version(connection, run_id)
    mine = train_steps.c.version_id == (None if newest is None else newest.id)
    so_far = connection.scalar(select(train_steps.c.so_far).where(mine))
    return StepSums.from_json(so_far) if so_far is not None else sum(_steps(connection, run_id), StepSums())


def _steps(connection: Connection, run_id: int) -> Iterator[StepSums]:
    """Yield the sums of the steps that count. Steps that were published before sums were stored have them in their
    metrics, without counts of rollouts."""
    counts = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None)
    rows = select(train_steps.c.fates, train_steps.c.metrics).join_from(train_steps, policy_versions).where(counts)
    for fates, metrics in connection.execute(rows):
        if fates is not None:
            yield StepSums.from_json(fates)
            continue
        masked = metrics.get("masked_tokens", {})
        left_out: dict[str, Tally] = {}
        for text, tokens in (*metrics.get("excluded_tokens", {}).items(), *masked.items()):
            left_out = added(left_out, {heading(text): Tally(tokens=tokens)})
        yield StepSums(Tally(tokens=metrics.get("trained_tokens", 0) - sum(masked.values())), left_out)
