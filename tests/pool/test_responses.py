"""Stored responses in the pool: written with their completion, read along what their contexts begin with."""

from dataclasses import replace

from proxy.pool.completions.records import NewResponse
from proxy.pool.completions.responses import ancestry, delete_response, newest, responses_of, store_again
from proxy.pool.database import open_pool
from proxy.pool.rollouts.attempts import open_session
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
