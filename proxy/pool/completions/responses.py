"""What is stored of Responses calls, so that later calls of the same attempt can name them.

A response stores the items of its input that no earlier one has, as a completion does with tokens: its whole context is
`context(prefix_of)[:prefix_length] + items`, then its output, which is made of the completion's reply. The row is
written in the completion's commit. A deleted response is only hidden, because others may begin with its items.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Integer, Row, Text, cast, func, insert, select, update

from proxy.pool.completions.records import NewResponse
from proxy.pool.database import Pool, retried
from proxy.pool.schema import completions, responses

IDS_PER_QUERY = 10_000
"""Ids per statement: databases limit its parameters."""


@dataclass(frozen=True)
class StoredResponse:
    """A stored response with its completion's answer."""

    row: NewResponse
    reply: dict[str, Any]
    finish_reason: str


def insert_response(connection: Connection, attempt_id: int, completion_id: int, new: NewResponse) -> None:
    """Write the row of a response."""
    values = {name: value for name, value in vars(new).items() if name != "id"}
    values["items"] = [msgspec.Raw(item) for item in new.items]
    names = {"attempt_id": attempt_id, "completion_id": completion_id, "response_id": new.id}
    connection.execute(insert(responses).values(values | names))


@retried
def store_again(pool: Pool, attempt_id: int, completion_id: int, new: NewResponse) -> None:
    """Store another response of a recorded completion, whose answer a retry gets under an id of its own."""
    with pool.write() as connection:
        insert_response(connection, attempt_id, completion_id, new)


def responses_of(pool: Pool, attempt_id: int, ids: Sequence[str], deleted: bool = False) -> dict[str, StoredResponse]:
    """The attempt's responses with these ids; with `deleted` also those that were deleted."""
    by_id: dict[str, StoredResponse] = {}
    with pool.read() as connection:
        for start in range(0, len(ids), IDS_PER_QUERY):
            some = responses.c.response_id.in_(ids[start : start + IDS_PER_QUERY])
            which = some if deleted else some & responses.c.deleted_at.is_(None)
            by_id |= {each.row.id: each for each in _read(connection, attempt_id, which)}
    return by_id


def ancestry(pool: Pool, attempt_id: int, response_id: str) -> list[StoredResponse]:
    """The response and those that its context begins with, the first one first; empty for an unknown or deleted one."""
    with pool.read() as connection:
        own = (responses.c.attempt_id == attempt_id) & (responses.c.response_id == response_id)
        chain = select(responses.c.response_id, responses.c.prefix_of).where(own, responses.c.deleted_at.is_(None))
        walk = chain.cte("ancestry", recursive=True)
        older = responses.alias()
        same = (older.c.attempt_id == attempt_id) & (older.c.response_id == walk.c.prefix_of)
        walk = walk.union_all(select(older.c.response_id, older.c.prefix_of).select_from(older.join(walk, same)))
        return list(_read(connection, attempt_id, responses.c.response_id.in_(select(walk.c.response_id))))


def newest(pool: Pool, attempt_id: int) -> str | None:
    """The id of the attempt's last response."""
    query = select(responses.c.response_id).where(responses.c.attempt_id == attempt_id)
    with pool.read() as connection:
        return connection.execute(query.order_by(responses.c.id.desc()).limit(1)).scalar()


def stored_bytes(pool: Pool, attempt_id: int) -> int:
    """How many bytes the attempt's responses take, as the database holds them."""
    columns = (responses.c["items"], responses.c.fields)
    if pool.dialect == "sqlite":
        sizes = [func.length(column, type_=Integer) for column in columns]
    else:
        sizes = [func.octet_length(cast(column, Text), type_=Integer) for column in columns]
    query = select(func.coalesce(func.sum(sizes[0] + sizes[1]), 0)).where(responses.c.attempt_id == attempt_id)
    with pool.read() as connection:
        return int(connection.execute(query).scalar_one())


@retried
def delete_response(pool: Pool, attempt_id: int, response_id: str, at: float) -> bool:
    """Hide a response; False where there is none of this id."""
    this = (responses.c.attempt_id == attempt_id) & (responses.c.response_id == response_id)
    with pool.write() as connection:
        hidden = connection.execute(
            update(responses).where(this, responses.c.deleted_at.is_(None)).values(deleted_at=at)
        )
        return bool(hidden.rowcount)


def _read(connection: Connection, attempt_id: int, which: ColumnElement[bool]) -> list[StoredResponse]:
    query = (
        select(responses, completions.c.reply, completions.c.finish_reason)
        .join_from(responses, completions)
        .where(responses.c.attempt_id == attempt_id, which)
    )
    return [_from_row(row) for row in connection.execute(query.order_by(responses.c.id))]


def _from_row(row: Row[Any]) -> StoredResponse:
    new = NewResponse(
        id=row.response_id,
        previous=row.previous,
        prefix_of=row.prefix_of,
        prefix_length=row.prefix_length,
        items=tuple(map(msgspec.json.encode, row.items)),
        fields=row.fields,
        fields_of=row.fields_of,
        usage=row.usage,
        created_at=int(row.created_at),
    )
    return StoredResponse(new, row.reply, row.finish_reason)
