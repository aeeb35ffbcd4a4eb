"""Stored responses in the pool: written with their completion, read along what their contexts begin with."""

from dataclasses import replace
from typing import Any

import msgspec
from sqlalchemy import update

from proxy.pool.completions.records import NewResponse
from proxy.pool.completions.responses import (
    ancestry,
    delete_response,
    newest,
    responses_of,
    store_again,
    stored_bytes,
)
from proxy.pool.database import Pool, open_pool
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.attempts import open_session
from proxy.pool.schema import responses
from tests.pool.make import new_completion, record


def response(id: str, prefix_of: str | None = None, fields: dict[str, str] | None = None) -> NewResponse:
    return NewResponse(
        id=id,
        previous=None,
        prefix_of=prefix_of,
        prefix_length=1 if prefix_of else 0,
        items=(b'{"role":"user","content":"\\u0000 \xc3\xa9"}',),
        fields=fields,
        fields_of=None if fields else "a",
        usage={"input_tokens": 1},
        created_at=7,
    )


def test_a_response_comes_back_with_what_it_begins_with(database: str) -> None:
    pool = open_pool(database)
    mine, other = open_session(pool, "mine"), open_session(pool, "other")
    first, second = response("a", fields={"model": "m"}), response("b", "a")
    rows = [replace(new_completion(mine.id), response=each) for each in (first, second)]
    completion_id, *_ = record(pool, [*rows, new_completion(mine.id)])
    assert [each.row for each in ancestry(pool, mine.id, "b")] == [first, second]
    assert responses_of(pool, mine.id, ["b", "c"])["b"].reply == {"role": "assistant", "content": "ok"}
    assert newest(pool, mine.id) == "b" and newest(pool, other.id) is None
    assert ancestry(pool, other.id, "b") == [] and responses_of(pool, other.id, ["a", "b"]) == {}
    assert not delete_response(pool, other.id, "a", 8.0) and delete_response(pool, mine.id, "a", 8.0)
    assert ancestry(pool, mine.id, "a") == [] and len(ancestry(pool, mine.id, "b")) == 2
    assert set(responses_of(pool, mine.id, ["a", "b"])) == {"b"}
    assert set(responses_of(pool, mine.id, ["a", "b"], deleted=True)) == {"a", "b"}
    store_again(pool, mine.id, completion_id, response("d", "b"))
    assert [each.row.id for each in ancestry(pool, mine.id, "d")] == ["a", "b", "d"]
    pool.close()


DAMAGES: list[tuple[dict[str, Any], str]] = [
    ({"completion_id": 1}, "its completion 1 is none of its attempt"),
    ({"prefix_of": "c"}, "it begins with response 'c', which is no earlier one of its attempt"),
    ({"prefix_of": None}, "it shares 1 items but names no response"),
    ({"prefix_length": 3}, "it shares 3 items with response 'a', which has 2"),
    ({"fields_of": "b"}, "its fields are those of response 'b', which is no earlier one with fields"),
    ({"fields_of": None}, "its fields are no JSON object"),
    ({"items": {}}, "its items are no list"),
]


def test_verify_names_every_damaged_response(database: str) -> None:
    pool = open_pool(database)
    other, mine = open_session(pool, "other"), open_session(pool, "mine")
    record(pool, [new_completion(other.id)])
    responses_of_mine = response("a", fields={"model": "m"}), response("b", "a"), response("d", "b")
    record(pool, [replace(new_completion(mine.id), response=each) for each in responses_of_mine])
    assert verify(pool).damages == [] and stored_bytes(pool, mine.id) > 30 and stored_bytes(pool, other.id) == 0
    whole = response("b", "a")
    for values, sentence in DAMAGES:
        change(pool, values)
        damages = [damage for damage in verify(pool).damages if "response 2" in damage]
        assert damages == [f"attempt {mine.id}, response 2: {sentence}"]
        change(pool, {"completion_id": 3, "prefix_of": "a", "prefix_length": 1, "fields_of": "a"})
        change(pool, {"items": [msgspec.Raw(item) for item in whole.items]})
    if pool.dialect == "sqlite":
        with pool.write() as connection:
            connection.exec_driver_sql("update responses set items = ? where id = 2", (b"not packed",))
        assert verify(pool).damages == [
            f"attempt {mine.id}, response 2: its items are no list",
            f"attempt {mine.id}, response 3: it begins with response 'b', whose items cannot be read",
        ]
    pool.close()


def change(pool: Pool, values: dict[str, Any]) -> None:
    with pool.write() as connection:
        connection.execute(update(responses).where(responses.c.id == 2).values(values))
