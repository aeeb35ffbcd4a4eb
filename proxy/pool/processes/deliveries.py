"""Which answers reached their clients. Only what did not arrive is written: such a completion is not trained, and a
repeat of its request gets it again.

Each proxy stands in `proxies` with its last completion and those that were on their way, written about once a second.
When it is killed, these and what lies beyond are in doubt: each counts as undelivered unless a later one follows it.
Marks change only while the attempt is open, so that what a trainer has leased stays as it is. Left out: answers that
were in doubt when their attempt ended; they count as delivered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, delete, exists, func, select, update

from proxy.pool.completions.records import ABANDONED, Completion
from proxy.pool.completions.store import Ledger, from_row
from proxy.pool.database import Pool, insert_if_new, insert_row, locked, retried
from proxy.pool.processes.owners import Owner, at_work, database_time, this_process
from proxy.pool.schema import TOKENS, attempts, completions, proxies, undelivered

WHOLE = ("stop", "length", "tool_calls")
"""Finish reasons of an answer that can be served again."""
AT_WORK = select(proxies).where(proxies.c.ended_at.is_(None)).order_by(proxies.c.id)


@dataclass(frozen=True)
class Missing:
    """A whole answer that did not arrive and that nobody is serving again."""

    completion_id: int
    fingerprint: bytes
    sampled: int
    """Its tokens."""
    cut: bool
    """Whether it ended at the limit of its length."""


@retried
def open_ledger(pool: Pool, tokenizer: str | None = None) -> Ledger:
    """Enter this process as a proxy with the fingerprint of its tokenizer, and mark what dead ones left in doubt."""
    me = this_process()
    with pool.write() as connection:
        now = database_time(connection, pool)
        last = connection.scalar(select(func.max(completions.c.id))) or 0  # all further ones come behind
        values = {"owner": msgspec.to_builtins(me), "seen_at": now, "confirmed": last, "on_the_way": []}
        proxy_id = insert_row(connection, proxies, values | {"tokenizer": tokenizer})
    settle_the_dead(pool)
    return Ledger(proxy_id)


@retried
def confirm(pool: Pool, proxy_id: int, confirmed: int, on_the_way: list[int]) -> None:
    """A sign of life, of a dead one too: up to this completion, all but those on their way are settled."""
    with pool.write() as connection:
        state = {"confirmed": confirmed, "on_the_way": on_the_way, "ended_at": None}
        values = state | {"seen_at": database_time(connection, pool)}
        connection.execute(update(proxies).where(proxies.c.id == proxy_id).values(values))


def settle_the_dead(pool: Pool) -> None:
    """Mark what proxies that are gone left in doubt, and let go of what they were serving again."""
    me = this_process()
    with pool.read() as connection:
        gone = _gone(connection.execute(AT_WORK).all(), me, database_time(connection, pool))
    if gone:
        _settle(pool, me)


def _gone(rows: Sequence[Row[Any]], me: Owner, now: float) -> list[Row[Any]]:
    return [row for row in rows if not at_work(msgspec.convert(row.owner, Owner), me, now - row.seen_at)]


@retried
def _settle(pool: Pool, me: Owner) -> None:
    with pool.write() as connection:
        now = database_time(connection, pool)
        for proxy in _gone(locked(connection, AT_WORK), me, now):
            later = completions.alias()
            same_attempt = later.c.attempt_id == completions.c.attempt_id
            followed = exists().where(later.c.follows == completions.c.id, same_attempt)
            unsettled = (completions.c.id > proxy.confirmed) | completions.c.id.in_(proxy.on_the_way)
            _mark(connection, (completions.c.proxy_id == proxy.id) & unsettled & ~followed)
            held = undelivered.c.claimed_by == proxy.id
            connection.execute(update(undelivered).where(held).values(claimed_by=None))
            connection.execute(update(proxies).where(proxies.c.id == proxy.id).values(ended_at=now))


@retried
def mark_undelivered(pool: Pool, completion_id: int) -> bool:
    """The client went away before it had the end of this answer. True: written, or nothing to write."""
    with pool.write() as connection:
        _mark(connection, completions.c.id == completion_id)
    return True


def _mark(connection: Connection, which: ColumnElement[bool]) -> None:
    """Mark these completions, as far as they are whole answers of open attempts."""
    columns = (completions.c.id, completions.c.attempt_id, completions.c.fingerprint)
    whole = completions.c.finish_reason.in_(WHOLE) & completions.c.fingerprint.is_not(None)
    found = connection.execute(select(*columns).where(which, whole)).all()
    still_open = select(attempts.c.id).where(attempts.c.id.in_({row.attempt_id for row in found}))
    held = {
        row.id for row in locked(connection, still_open.where(attempts.c.closed_at.is_(None)).order_by(attempts.c.id))
    }
    for row in found:
        if row.attempt_id in held:
            values = {"completion_id": row.id, "attempt_id": row.attempt_id, "fingerprint": row.fingerprint}
            insert_if_new(connection, undelivered, values)
            _retrain(connection, row.id, None, ABANDONED)


def missing_of(pool: Pool, attempt_id: int) -> list[Missing]:
    """What of an attempt did not arrive and can be claimed."""
    query = (
        select(
            undelivered.c.completion_id, undelivered.c.fingerprint, completions.c.finish_reason, TOKENS.label("sampled")
        )
        .join_from(undelivered, completions)
        .where(undelivered.c.attempt_id == attempt_id, undelivered.c.claimed_by.is_(None))
    )
    with pool.read() as connection:
        rows = connection.execute(query.order_by(undelivered.c.completion_id)).all()
    return [Missing(row.completion_id, row.fingerprint, row.sampled, row.finish_reason == "length") for row in rows]


@retried
def claim(pool: Pool, completion_id: int, proxy_id: int) -> Completion | None:
    """Take an answer for serving it again; None when another call has it, or its attempt has ended."""
    with pool.write() as connection:
        free = (undelivered.c.completion_id == completion_id) & undelivered.c.claimed_by.is_(None)
        taken = connection.execute(update(undelivered).where(free, _is_open()).values(claimed_by=proxy_id)).rowcount
        if not taken:
            return None
        return from_row(connection.execute(select(completions).where(completions.c.id == completion_id)).one())


@retried
def release(pool: Pool, completion_id: int, proxy_id: int) -> None:
    """Let go of this proxy's claim: this client went away as well."""
    with pool.write() as connection:
        this = (undelivered.c.completion_id == completion_id) & (undelivered.c.claimed_by == proxy_id)
        connection.execute(update(undelivered).where(this).values(claimed_by=None))


@retried
def mark_delivered(pool: Pool, completion_id: int) -> None:
    """The answer has arrived after all: it is trained like any other."""
    with pool.write() as connection:
        this = undelivered.c.completion_id == completion_id
        if connection.execute(delete(undelivered).where(this, _is_open())).rowcount:
            _retrain(connection, completion_id, ABANDONED, None)


def _is_open() -> ColumnElement[bool]:
    return exists().where(attempts.c.id == undelivered.c.attempt_id, attempts.c.closed_at.is_(None))


def _retrain(connection: Connection, completion_id: int, before: str | None, after: str | None) -> None:
    """Change the reason why a completion is not trained, where it is this one."""
    as_before = completions.c.untrainable.is_(None) if before is None else completions.c.untrainable == before
    this = (completions.c.id == completion_id) & as_before
    connection.execute(update(completions).where(this).values(untrainable=after))
