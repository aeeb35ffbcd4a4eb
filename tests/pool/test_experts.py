"""The experts of a completion: in as few bytes as they need, back as they were, and proved like its tokens."""

from array import array
from dataclasses import replace

import pytest
from sqlalchemy import update

from proxy.pool.completions.records import int_bytes
from proxy.pool.completions.routed_experts import RoutedExperts, narrowed, pack, unpack
from proxy.pool.completions.store import of_attempt, of_attempts
from proxy.pool.database import open_pool
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.attempts import open_session
from proxy.pool.schema import completions
from tests.pool.make import new_completion, record


@pytest.mark.parametrize(("largest", "width"), [(255, 1), (256, 2), (65535, 2)])
def test_numbers_take_the_bytes_that_they_need(largest: int, width: int) -> None:
    numbers = [0, 1, 2, 3, 4, largest]
    packed = narrowed(int_bytes(numbers), 7, layers=3, top_k=1)
    assert (packed.start, packed.end, packed.width, len(packed.ids)) == (7, 9, width, width * 6)
    assert list(array("B" if width == 1 else "H", packed.ids)) == numbers
    assert packed.since(8).ids == packed.ids[3 * width :] and packed.since(9).end == 9


@pytest.mark.parametrize(("numbers", "reason"), [([0, -1], "negative"), ([65536, 0], "65535"), ([1], "no int32")])
def test_what_names_no_expert_is_refused(numbers: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        narrowed(int_bytes(numbers), 0, layers=2, top_k=1)


@pytest.mark.parametrize(
    "stored", [b"", b"\0" * 8, pack(RoutedExperts(0, 2, 2, 1, b"\0" * 3)), pack(RoutedExperts(0, 1, 1, 3, b""))]
)
def test_what_was_never_written_is_not_read(stored: bytes) -> None:
    with pytest.raises(ValueError, match="hold no header|are no positions"):
        unpack(stored)


def test_rows_keep_them_and_verify_holds_them_to_their_tokens(database: str) -> None:
    pool = open_pool(database)
    attempt = open_session(pool, "a")
    whole = RoutedExperts(0, 2, 2, 1, bytes(range(12)))  # of three of the four tokens: the last one has none
    plain = new_completion(attempt.id)
    first, second = record(pool, [replace(plain, experts=whole), plain])
    assert [item.experts for item in of_attempt(pool, attempt.id)] == [whole, None]
    with pool.read() as connection:
        assert [item.experts for item in of_attempts(connection, [attempt.id], experts=False)[attempt.id]] == [None] * 2
    assert verify(pool).damages == []
    damaged = {first: pack(whole.since(1)), second: pack(whole)[:-1]}
    with pool.write() as connection:
        for id, stored in damaged.items():
            connection.execute(update(completions).where(completions.c.id == id).values(experts=stored))
    short, broken = verify(pool).damages
    assert (
        "cover the tokens 1 to 3; they should start at 0 or before and end at 3" in short
        and "cannot be read (11 bytes" in broken
    )
    pool.close()
