"""What is asked again and again of a pool reads few rows, however many the pool holds, on both databases."""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import event, text, update
from sqlalchemy.engine import Engine

from benchmarks.pool import fill, finish_group
from proxy.pool.database import Pool
from proxy.pool.inspect.account import account
from proxy.pool.inspect.run_status import traffic
from proxy.pool.rollouts.groups import open_rollouts
from proxy.pool.rollouts.queue import lost_groups, replacements, spoiled_of
from proxy.pool.rollouts.runs import admission
from proxy.pool.schema import policy_versions
from proxy.pool.training.steps import Published, latest, newest, publish
from proxy.pool.training.windowed_fifo import LeaseRule, lease, of_step

ROWS = 1_000_000
LARGE = ("groups", "rollouts", "attempts", "completions")
MOST_ROWS = 20_000
"""Rows that one statement may read on PostgreSQL."""
MOST_INSTRUCTIONS = 200_000
"""Instructions of SQLite's virtual machine for one operation. It takes several for each row that it reads."""


@contextmanager
def watched(pool: Pool) -> Iterator[list[str]]:
    """Collect what is wrong with the plans of the statements that the block executes."""
    troubles: list[str] = []
    instructions = 0

    def tick() -> None:
        nonlocal instructions
        instructions += 1000

    def before(_connection: Any, cursor: Any, statement: str, given: Any, _context: Any, many: bool) -> None:
        if many or not statement.startswith(("SELECT", "UPDATE")):
            return
        if pool.dialect == "sqlite":
            database: sqlite3.Connection = cursor.connection
            database.set_progress_handler(None, 0)
            plan = [row[3] for row in cursor.execute(f"EXPLAIN QUERY PLAN {statement}", given).fetchall()]
            troubles.extend(f"{step}: {statement}" for step in plan if step.removeprefix("SCAN ") in LARGE)
            database.set_progress_handler(tick, 1000)
        else:
            analyzed = "ANALYZE, " if statement.startswith("SELECT") else ""
            cursor.execute(f"EXPLAIN ({analyzed}FORMAT JSON) {statement}", given)
            (plan,) = cursor.fetchone()
            root = json.loads(plan)[0]["Plan"] if isinstance(plan, str) else plan[0]["Plan"]
            troubles.extend(f"{trouble}: {statement}" for trouble in costly(root))

    event.listen(Engine, "before_cursor_execute", before)
    try:
        yield troubles
    finally:
        event.remove(Engine, "before_cursor_execute", before)
    if instructions > MOST_INSTRUCTIONS:
        troubles.append(f"{instructions} instructions")


def costly(node: dict[str, Any]) -> Iterator[str]:
    """The nodes of a plan of PostgreSQL that scan a large table, or read many rows."""
    read = (node.get("Actual Rows", 0) + node.get("Rows Removed by Filter", 0)) * node.get("Actual Loops", 1)
    if node["Node Type"] == "Seq Scan" and node["Relation Name"] in LARGE or read > MOST_ROWS:
        yield f"{node['Node Type']} of {node.get('Relation Name')}, {read:.0f} rows"
    for child in node.get("Plans", ()):
        yield from costly(child)


@pytest.mark.long
def test_standing_queries_of_a_million_groups_read_few_rows(pool: Pool) -> None:
    run_id = fill(pool, ROWS)
    if pool.dialect == "postgresql":  # a user's server does this by itself
        with pool.write() as connection:
            connection.execute(text("analyze"))
    version = latest(pool, run_id)
    assert version is not None
    step, rule = version.step + 1, LeaseRule(groups=8, window=32, max_staleness=1)

    def finish() -> None:
        finish_group(pool, run_id, version.name, members=2, calls=2, tokens=8)

    operations: dict[str, Callable[[], Any]] = {
        "idle lease": lambda: lease(pool, run_id, step, rule),
        "admission": lambda: admission(pool, run_id),
        "newest": lambda: newest(pool),
        "open, sample, finish": finish,
        "open rollouts": lambda: open_rollouts(pool, run_id),
        "replacements": lambda: replacements(pool, run_id, 0),
        "lost groups": lambda: lost_groups(pool, run_id, "agent"),
        "spoiled": lambda: spoiled_of(pool, run_id, "old-5"),
        "of step": lambda: of_step(pool, run_id, 5),
        "account": lambda: account(pool, run_id),
        "traffic": lambda: traffic(pool, run_id, ROWS),
    }
    for _ in range(7):
        finish()
    wrong = {}
    for name, work in operations.items():
        with watched(pool) as troubles:
            work()
        wrong[name] = troubles
    with pool.write() as connection:  # as if its push were under way
        connection.execute(update(policy_versions).where(policy_versions.c.id == version.id).values(pushed_at=None))
    with watched(pool) as troubles:
        assert admission(pool, run_id).open_groups > 8
    wrong["admission during a push"] = troubles
    for _ in range(8):
        finish()
    with watched(pool) as troubles:
        taken = lease(pool, run_id, step, rule)
    wrong["lease"] = troubles
    assert taken is not None and len(taken.groups) == 8
    done = Published(step=step, checkpoint="c", hf_dir="h", metrics={}, parent=version.id)
    with watched(pool) as troubles:
        publish(pool, run_id, done)
    wrong["publish"] = troubles
    assert {name: troubles for name, troubles in wrong.items() if troubles} == {}
