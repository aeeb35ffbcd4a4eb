"""The audit log: nobody waits for it, and its size is bounded."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import select

from proxy.pool.audit import MAX_WAITING, AuditLog, audit_lines
from proxy.pool.database import Pool, open_pool
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt, open_session
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run, record_event
from proxy.pool.schema import events
from tests.pool.make import TASK


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Hold the database's one place for a writer."""
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("begin immediate")
    yield
    other.execute("rollback")
    other.close()


def written(pool: Pool) -> list[tuple[str, str]]:
    with pool.read() as connection:
        return [(row.kind, row.detail) for row in connection.execute(select(events).order_by(events.c.id))]


def test_nobody_waits_for_a_locked_database_and_nothing_is_lost(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    with writing(tmp_path / "pool.db"):
        audit = AuditLog(pool)
        for _ in range(5):
            audit.note("admin_call", "GET /metrics")
        for number in range(MAX_WAITING + 6):
            audit.note("key_refused", str(number))
        assert written(pool) == []
    audit.close()
    rows = written(pool)
    assert sum(kind == "key_refused" for kind, _ in rows) == MAX_WAITING - 1
    assert ("events_lost", "7 events did not fit") in rows
    details = [detail for kind, detail in rows if kind == "admin_call"]
    assert details in (["GET /metrics (5 times)"], ["GET /metrics", "GET /metrics (4 times)"])


def test_equal_events_are_counted_and_not_repeated(pool: Pool) -> None:
    audit = AuditLog(pool)
    audit.note("admin_call", "GET /metrics")
    while not written(pool):
        time.sleep(0.05)
    for _ in range(50):
        audit.note("admin_call", "GET /metrics")
    assert len(written(pool)) == 1
    audit.close()
    assert written(pool) == [("admin_call", "GET /metrics"), ("admin_call", "GET /metrics (50 times)")]


def test_the_lines_tell_keys_refusals_and_what_runs_noted(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    [rollout] = open_group(pool, run.id, TASK, 1)
    attempt, key = open_attempt(pool, rollout.rollout_id, "codex")
    close_attempt(pool, attempt.id, Ending(failure="agent_budget"))
    open_session(pool, "stranger")
    record_event(pool, run.id, "note", "\x1b[2Jcleared\nthe screen")
    lines = list(audit_lines(pool))
    assert [line.split()[1] for line in lines] == ["key_issued", "key_revoked", "key_issued", "note"]
    assert lines[1].endswith("run r: attempt 1 of codex, agent_budget") and key not in "".join(lines)
    assert lines[3].endswith("run r:  [2Jcleared the screen") and "\x1b" not in lines[3]
