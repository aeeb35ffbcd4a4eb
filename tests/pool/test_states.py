"""The states of groups: their table, the function that follows it, the page that shows it, what databases refuse."""

import re
from itertools import product
from pathlib import Path

import pytest
from sqlalchemy import MetaData, create_engine, insert, select, text, update
from sqlalchemy.exc import IntegrityError

from proxy.pool.database import Pool, open_pool, upgrade
from proxy.pool.errors import UserError
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.rollouts.states import GROUP_STATES, TRANSITIONS, move
from proxy.pool.schema import groups
from tests.pool.make import TASK

ROOT = Path(__file__).parents[2]


def step_of(state: str) -> int | None:
    return 1 if state in ("LEASED", "CONSUMED") else None


def test_the_page_shows_the_table() -> None:
    lines = ["[*] --> RUNNING", *(f"{before} --> {after}: {when}" for (before, after), when in TRANSITIONS.items())]
    diagram = "".join(f"    {line}\n" for line in ("direction LR", *lines))
    assert f"```mermaid\nstateDiagram-v2\n{diagram}```\n" in (ROOT / "docs" / "architecture.md").read_text()


def test_nothing_else_changes_states() -> None:
    """Others write one column that stands in the call, such as where an archive keeps the group."""
    sources = [path for package in ("proxy", "harness", "trainer") for path in (ROOT / package).rglob("*.py")]
    updates = {
        (path.name, column)
        for path in sources
        for column in re.findall(r"update\((?:schema\.)?groups\)(?:.*values\((\w+)=)?", path.read_text())
    }
    assert {path for path, column in updates if column in ("", "state", "step", "reason")} == {"states.py"}
    assert ("archive.py", "archive_id") in updates


def test_groups_move_along_the_table_and_no_other_way(pool: Pool) -> None:
    run_id = open_run(pool, "r", "train", {}).id
    [member], [other] = open_group(pool, run_id, TASK, 1), open_group(pool, run_id, TASK, 1)
    this = groups.c.id == member.group_id
    for before, after in product(GROUP_STATES, GROUP_STATES):
        with pool.write() as connection:
            connection.execute(update(groups).where(this).values(state=before, step=step_of(before)))
            if (before, after) in TRANSITIONS:
                assert move(connection, this, before, after, step=step_of(after)) == 1
                assert move(connection, this, before, after, step=step_of(after)) == 0  # it is in `before` no more
            else:
                with pytest.raises(ValueError, match=f"never goes from {before} to {after}"):
                    move(connection, this, before, after, step=step_of(after))
            rows = connection.execute(select(groups.c.id, groups.c.state, groups.c.step)).all()
        state = after if (before, after) in TRANSITIONS else before
        assert set(map(tuple, rows)) == {(member.group_id, state, step_of(state)), (other.group_id, "RUNNING", None)}


def test_databases_refuse_what_cannot_be(pool: Pool) -> None:
    open_group(pool, open_run(pool, "r", "train", {}).id, TASK, 1)
    for wrong in (
        "groups set state = 'BANANA'",
        "groups set state = 'LEASED'",
        "groups set step = 1",
        "groups set state = 'CONSUMED', step = null",
        "groups set purpose = 'train'",
        "groups set purpose = 'eval'",  # with a position
        "runs set purpose = 'play'",
        "rollouts set reward = -9e999" if pool.dialect == "sqlite" else "rollouts set reward = '-Infinity'",
        "rollouts set reward = 'NaN'",
    ):
        with pytest.raises(IntegrityError, match=r"(?i)check"), pool.write() as connection:
            connection.execute(text(f"update {wrong}"))


def test_an_old_pool_gets_checks_and_positions_and_one_with_an_impossible_row_is_refused(database: str) -> None:
    engine = create_engine(database)
    with engine.begin() as connection:
        upgrade(connection, "0012")
        older = MetaData()
        older.reflect(connection)
        run = {"id": 1, "name": "r", "purpose": "train", "config": {}, "created_at": 1.0}
        task = {"id": 1, "run_id": 1, "name": "t", "domain": "agent", "spec": TASK}
        group = {"run_id": 1, "queue_index": 0, "task_id": 1, "size": 1, "state": "BANANA", "created_at": 1.0}
        held_out, third = {"queue_index": 1, "purpose": "eval"}, {"queue_index": 2, "state": "DONE"}
        rows = [("runs", run), ("tasks", task), *(("groups", group | other) for other in ({}, held_out, third))]
        for table, row in rows:
            connection.execute(insert(older.tables[table]).values(row))
    with pytest.raises(UserError, match="2 rows of the pool's table groups do not meet the condition state in"):
        open_pool(database)
    with engine.begin() as connection:
        connection.execute(text("update groups set state = 'DONE'"))
    engine.dispose()
    pool = open_pool(database)
    with pytest.raises(IntegrityError, match=r"(?i)check"), pool.write() as connection:
        connection.execute(update(groups).values(state="BANANA"))
    with pool.read() as connection:
        stored = connection.execute(select(groups.c.state, groups.c.position).order_by(groups.c.id)).all()
        assert list(map(tuple, stored)) == [("DONE", 0), ("DONE", None), ("DONE", 1)]
        if pool.dialect == "sqlite":
            assert connection.exec_driver_sql("pragma integrity_check").scalars().all() == ["ok"]
    pool.close()
