"""The SQL of answers that did not reach their client: marks, claims, and what a crashed proxy leaves open.

Only undelivered answers are written: such a completion is not trained, and a repeat of its request gets it again
(proxy/recording/redelivery). Each proxy has a row in `proxies` with its last completion and those in transit, written
about once a second. When it is killed, these and all later ones may be undelivered: each is marked unless another
completion follows it. Marks change only while the attempt is open, so that what a trainer has leased stays as it is.
Left out: answers that were still uncertain when their attempt ended; they count as delivered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, delete, exists, func, select, update

from proxy.pool.completions.records import SERVED_FINISH_REASONS, Completion
from proxy.pool.completions.store import from_row
from proxy.pool.database import Pool, insert_if_new, insert_row, locked, retried
from proxy.pool.processes.owners import PoolProcess, database_time, is_alive, this_process
from proxy.pool.schema import TOKENS, attempts, completions, proxies, undelivered
from proxy.pool.untrained import UntrainedReason

AT_WORK = select(proxies).where(proxies.c.ended_at.is_(None)).order_by(proxies.c.id)


@dataclass(frozen=True)
class UndeliveredAnswer:
    """A whole answer that did not arrive and that no call is serving again."""

    completion_id: int
    fingerprint: bytes
    sampled: int
    """How many tokens it has."""
    cut: bool
    """Whether it ended at the limit of its length."""


@retried
def register_proxy(pool: Pool, tokenizer: str | None = None) -> int:
    """Register this process as a proxy and return its id; mark answers of crashed proxies as possibly undelivered.

    `tokenizer`: the fingerprint of its tokenizer.
    """
    me = this_process()
    with pool.write() as connection:
        now = database_time(connection, pool)
        last = connection.scalar(select(func.max(completions.c.id))) or 0  # this proxy's have higher ids
        values = {"owner": msgspec.to_builtins(me), "seen_at": now, "confirmed": last, "on_the_way": []}
        proxy_id = insert_row(connection, proxies, values | {"tokenizer": tokenizer})
    settle_dead_proxies(pool)
    return proxy_id


@retried
def confirm(pool: Pool, proxy_id: int, confirmed: int, in_transit: list[int]) -> bool:
    """Record that this proxy lives, and that its completions up to `confirmed` are delivered except those in transit.

    Return True: it is written. A proxy that others took for dead counts as alive again. `confirmed` is 0 while it has
    recorded none. Then the value of its registration stays: with 0, who settles it would look at all completions.
    """
    with pool.write() as connection:
        state = {"on_the_way": in_transit, "ended_at": None} | ({"confirmed": confirmed} if confirmed else {})
        values = state | {"seen_at": database_time(connection, pool)}
        connection.execute(update(proxies).where(proxies.c.id == proxy_id).values(values))
    return True


def settle_dead_proxies(pool: Pool) -> None:
    """Mark answers of crashed proxies as possibly undelivered, and release their claims."""
    me = this_process()
    with pool.read() as connection:
        dead = _dead(connection.execute(AT_WORK).all(), me, database_time(connection, pool))
    if dead:
        _settle(pool, me)


def _dead(rows: Sequence[Row[Any]], me: PoolProcess, now: float) -> list[Row[Any]]:
    return [row for row in rows if not is_alive(msgspec.convert(row.owner, PoolProcess), me, now - row.seen_at)]


@retried
def _settle(pool: Pool, me: PoolProcess) -> None:
    with pool.write() as connection:
        now = database_time(connection, pool)
        for proxy in _dead(locked(connection, AT_WORK), me, now):
            later = completions.alias()
            same_attempt = later.c.attempt_id == completions.c.attempt_id
            followed = exists().where(later.c.follows == completions.c.id, same_attempt)
            unsettled = (completions.c.id > proxy.confirmed) | completions.c.id.in_(proxy.on_the_way)
            _mark(connection, (completions.c.proxy_id == proxy.id) & unsettled & ~followed)
            claimed = undelivered.c.claimed_by == proxy.id
            connection.execute(update(undelivered).where(claimed).values(claimed_by=None))
            connection.execute(update(proxies).where(proxies.c.id == proxy.id).values(ended_at=now))


@retried
def mark_undelivered(pool: Pool, completion_id: int) -> bool:
    """Mark an answer whose client left before its end. True: it is written, or there is nothing to write."""
    with pool.write() as connection:
        _mark(connection, completions.c.id == completion_id)
    return True


def _mark(connection: Connection, which: ColumnElement[bool]) -> None:
    """Mark those of these completions that are whole answers of open attempts."""
    columns = (completions.c.id, completions.c.attempt_id, completions.c.fingerprint)
    whole = completions.c.finish_reason.in_(SERVED_FINISH_REASONS) & completions.c.fingerprint.is_not(None)
    rows = connection.execute(select(*columns).where(which, whole)).all()
    still_open = select(attempts.c.id).where(attempts.c.id.in_({row.attempt_id for row in rows}))
    # The lock keeps an attempt open until the marks are written: a trainer may lease it as soon as it is closed.
    open_ids = {
        row.id for row in locked(connection, still_open.where(attempts.c.closed_at.is_(None)).order_by(attempts.c.id))
    }
    for row in rows:
        if row.attempt_id in open_ids:
            values = {"completion_id": row.id, "attempt_id": row.attempt_id, "fingerprint": row.fingerprint}
            insert_if_new(connection, undelivered, values)
            _retrain(connection, row.id, None, UntrainedReason.ABANDONED)


def undelivered_of(pool: Pool, attempt_id: int) -> list[UndeliveredAnswer]:
    """The answers of an attempt that did not arrive and can be claimed."""
    query = (
        select(
            undelivered.c.completion_id, undelivered.c.fingerprint, completions.c.finish_reason, TOKENS.label("sampled")
        )
        .join_from(undelivered, completions)
        .where(undelivered.c.attempt_id == attempt_id, undelivered.c.claimed_by.is_(None))
    )
    with pool.read() as connection:
        rows = connection.execute(query.order_by(undelivered.c.completion_id)).all()
    return [
        UndeliveredAnswer(row.completion_id, row.fingerprint, row.sampled, row.finish_reason == "length")
        for row in rows
    ]


@retried
def claim(pool: Pool, completion_id: int, proxy_id: int) -> Completion | None:
    """Claim an answer to serve it again; None when another call has it, or its attempt has ended.

    One conditional UPDATE, so that of several proxies exactly one wins.
    """
    with pool.write() as connection:
        free = (undelivered.c.completion_id == completion_id) & undelivered.c.claimed_by.is_(None)
        claimed = connection.execute(update(undelivered).where(free, _is_open()).values(claimed_by=proxy_id)).rowcount
        if not claimed:
            return None
        return from_row(connection.execute(select(completions).where(completions.c.id == completion_id)).one())


@retried
def release(pool: Pool, completion_id: int, proxy_id: int) -> None:
    """Release this proxy's claim: this client left as well."""
    with pool.write() as connection:
        this = (undelivered.c.completion_id == completion_id) & (undelivered.c.claimed_by == proxy_id)
        connection.execute(update(undelivered).where(this).values(claimed_by=None))


@retried
def mark_delivered(pool: Pool, completion_id: int) -> None:
    """Clear the mark of an answer that has arrived after all: it is trained like any other."""
    with pool.write() as connection:
        this = undelivered.c.completion_id == completion_id
        if connection.execute(delete(undelivered).where(this, _is_open())).rowcount:
            _retrain(connection, completion_id, UntrainedReason.ABANDONED, None)


def _is_open() -> ColumnElement[bool]:
    return exists().where(attempts.c.id == undelivered.c.attempt_id, attempts.c.closed_at.is_(None))


def _retrain(
    connection: Connection, completion_id: int, before: UntrainedReason | None, after: UntrainedReason | None
) -> None:
    """Change the reason why a completion is not trained, where it is this one."""
    as_before = completions.c.untrainable.is_(None) if before is None else completions.c.untrainable == before
    this = (completions.c.id == completion_id) & as_before
    connection.execute(update(completions).where(this).values(untrainable=after))
