"""Refused keys: the log and the pool name their source, never the key, and a source that goes on with it waits."""

import asyncio
import logging
import sqlite3
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
from sqlalchemy import select

from proxy.commands.main import main
from proxy.http.refused_keys import MAX_WAIT_SECONDS, wait_seconds
from proxy.pool.schema import events
from tests.proxy.conftest import Serve, Stand, user
from tests.proxy.test_auth import ADMIN, attempts

STRANGER = "bf-somebody-elses-secret-key"


def test_each_refusal_waits_longer_than_the_one_before() -> None:
    waits = [wait_seconds(number) for number in range(5000)]
    assert waits[0] == 0 < waits[1] and waits[-1] == MAX_WAIT_SECONDS
    assert all(earlier <= later for earlier, later in pairwise(waits))


async def test_a_source_of_refused_keys_is_noted_slowed_down_and_nobody_else_is(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    stand = await serve(lambda prompt, ids: "ok", host="0.0.0.0", limits={"free_refusals": 4})
    (_, key), _ = attempts(stand.pool)
    with caplog.at_level(logging.WARNING):
        before = time.monotonic()
        for _ in range(8):
            assert (await stand.chat(user("hi"), key=STRANGER))["status"] == 401
        assert time.monotonic() - before >= 0.1 + 0.2 + 0.4 + 0.8
    notes = [record.getMessage() for record in caplog.records if "refused a key" in record.getMessage()]
    assert [note.split()[5] for note in notes] == ["1", "2", "4", "8"]
    assert all("127.0.0.1," in note and "was not issued" in note and STRANGER not in note for note in notes)
    assert (await stand.chat(user("hi"), key=key))["status"] == 200


async def test_refusals_and_administrators_calls_are_in_the_audit_log(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand = await serve(lambda prompt, ids: "ok", admin_key=ADMIN)
    list(attempts(stand.pool))
    assert (await stand.chat(user("hi"), key=STRANGER))["status"] == 401
    for path in ("/metrics", "/health"):
        assert await admin(stand, path) == 200
    while len(rows(stand)) < 3:
        await asyncio.sleep(0.05)
    assert main(["pool", "events", str(tmp_path / "pool.db")]) == 0
    text = capsys.readouterr().out
    assert (
        "key_refused  127.0.0.1, 1 so far: the pool" in text
        and "has not issued this key" in text
        and STRANGER not in text
    )
    assert "admin_call   GET /metrics from 127.0.0.1" in text and "admin_call   GET /health from 127.0.0.1" in text
    assert "key_issued   run r: attempt 1 of command" in text and ADMIN not in text


async def test_metrics_are_answered_while_the_database_is_locked(serve: Serve, tmp_path: Path) -> None:
    stand = await serve(lambda prompt, ids: "ok", admin_key=ADMIN)
    with closing(sqlite3.connect(tmp_path / "pool.db", isolation_level=None)) as other:
        other.execute("begin immediate")
        assert await admin(stand, "/metrics") == 200 and rows(stand) == []
        other.execute("rollback")


async def admin(stand: Stand, path: str) -> int:
    headers, timeout = {"Authorization": f"Bearer {ADMIN}"}, aiohttp.ClientTimeout(total=30)
    async with stand.http.get(f"{stand.url}{path}", headers=headers, timeout=timeout) as answer:
        await answer.read()
        return answer.status


def rows(stand: Stand) -> list[str]:
    with stand.pool.read() as connection:
        return list(connection.execute(select(events.c.kind)).scalars())
