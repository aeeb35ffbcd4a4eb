"""Completions: group commit, links, checksums, closed attempts."""

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
from sqlalchemy import update

from proxy.pool.completions.records import RequestShape, int_bytes
from proxy.pool.completions.store import CompletionWriter, of_attempt, paths
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import AttemptClosed, PoolWriteError
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_session
from proxy.pool.schema import completions
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.pool.full_disk import full_disk
from tests.pool.make import new_completion


async def test_concurrent_completions_get_consecutive_ordinals(pool: Pool) -> None:
    attempt, writer = open_session(pool, "k"), CompletionWriter(pool)
    ids = await asyncio.gather(*(writer.add(new_completion(attempt.id)) for _ in range(50)))
    await writer.close()
    stored = of_attempt(pool, attempt.id)
    assert [item.id for item in stored] == ids
    assert [item.ordinal for item in stored] == list(range(50))


async def test_a_completion_comes_back_as_it_went_in(pool: Pool) -> None:
    attempt, writer = open_session(pool, "k"), CompletionWriter(pool)
    sent = replace(new_completion(attempt.id), shape=RequestShape(tools=7, turns=2, continues=1), given=((0, 1),))
    await writer.add(sent)
    stored = vars(of_attempt(pool, attempt.id)[0])
    assert {name: stored[name] for name in vars(sent)} == vars(sent)
    assert (stored["ordinal"], stored["label"]) == (0, None)


async def test_paths_follow_the_prefix_links_also_into_the_middle(pool: Pool) -> None:
    attempt, writer = open_session(pool, "k"), CompletionWriter(pool)
    first = await writer.add(new_completion(attempt.id, [1, 2], [3, 4]))
    branch = replace(new_completion(attempt.id, [9], [8]), prefix_of=first, prefix_length=3)
    await writer.add(replace(branch, path_crc=crc32(int_bytes([1, 2, 3, 9, 8]))))
    assert list(paths(of_attempt(pool, attempt.id)).values()) == [array("i", [1, 2, 3, 4]), array("i", [1, 2, 3, 9, 8])]


async def test_a_damaged_row_is_noticed(pool: Pool) -> None:
    attempt, writer = open_session(pool, "k"), CompletionWriter(pool)
    await writer.add(new_completion(attempt.id))
    with pool.write() as connection:
        connection.execute(update(completions).values(sampled=int_bytes([3, 5])))
    with pytest.raises(ValueError, match="do not match checksum"):
        paths(of_attempt(pool, attempt.id))


async def test_a_closed_attempt_takes_no_more_and_others_in_the_commit_do(pool: Pool) -> None:
    closed, alive, writer = open_session(pool, "a"), open_session(pool, "b"), CompletionWriter(pool)
    close_attempt(pool, closed.id, Ending())
    items = (new_completion(closed.id), new_completion(alive.id))
    refused, stored = await asyncio.gather(*map(writer.add, items), return_exceptions=True)
    assert isinstance(refused, AttemptClosed) and isinstance(stored, int)
    assert of_attempt(pool, closed.id) == []


async def test_a_full_disk_fails_the_call_and_the_next_one_works(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    attempt, writer = open_session(pool, "k"), CompletionWriter(pool)
    with full_disk(), pytest.raises(PoolWriteError, match="full"):
        await writer.add(new_completion(attempt.id, range(100_000)))
    await writer.add(new_completion(attempt.id, range(100_000)))
    assert len(of_attempt(pool, attempt.id)) == 1


async def test_words_that_a_database_cannot_hold_are_stored_with_a_mark_in_their_place(pool: Pool) -> None:
    attempt, writer = open_session(pool, "k"), CompletionWriter(pool)
    reply = {"role": "assistant", "content": "nul \0 and \N{GRINNING FACE}"}
    await writer.add(
        replace(
            new_completion(attempt.id), untrainable=Untrained(UntrainedReason.ENGINE_FAILED, "a\0b\udc80"), reply=reply
        )
    )
    [stored] = of_attempt(pool, attempt.id)
    assert str(stored.untrainable) == "engine_failed: a\N{REPLACEMENT CHARACTER}b?" and stored.reply == reply


async def test_a_row_that_cannot_be_written_takes_no_other_with_it(pool: Pool) -> None:
    attempt, writer = open_session(pool, "k"), CompletionWriter(pool)
    item = new_completion(attempt.id)
    unwritable = replace(item, reply={"role": "assistant", "content": "\ud800"})
    adding = map(writer.add, (item, unwritable, replace(item, prefix_of=999), item))
    first, *refused, last = await asyncio.gather(*adding, return_exceptions=True)
    await writer.close()
    assert [type(error) for error in refused] == [PoolWriteError, PoolWriteError]
    assert [(one.id, one.ordinal) for one in of_attempt(pool, attempt.id)] == [(first, 0), (last, 1)]


async def test_a_long_answer_takes_less_room_than_its_text_and_rows_of_before_are_read(pool: Pool) -> None:
    attempt, writer = open_session(pool, "k"), CompletionWriter(pool)
    replies = [{"role": "assistant", "content": text} for text in ("short", "one word after the other " * 100)]
    for reply in replies:
        await writer.add(replace(new_completion(attempt.id), reply=reply))
    await writer.close()
    assert [one.reply for one in of_attempt(pool, attempt.id)] == replies
    if pool.dialect != "sqlite":
        return
    with pool.write() as connection:
        stored = connection.exec_driver_sql("select reply from completions order by id").scalars().all()
        connection.exec_driver_sql("update completions set reply = ?", ('{"role": "assistant", "content": "old"}',))
    assert stored[0] == '{"role":"assistant","content":"short"}' and len(stored[1]) < 200
    assert [one.reply["content"] for one in of_attempt(pool, attempt.id)] == ["old", "old"]
