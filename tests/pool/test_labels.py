"""Labels in the pool: written when an attempt closes, worked out before that, absent from earlier rows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, select, text

from proxy.pool.completions.records import NewCompletion, RequestShape
from proxy.pool.completions.store import labelled, of_attempt
from proxy.pool.database import Pool, open_pool, upgrade
from proxy.pool.export.files import export
from proxy.pool.inspect.show import show
from proxy.pool.read import RolloutFilter
from proxy.pool.rollouts.attempts import Ending, close_attempt, close_interrupted, open_attempt, open_session
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import completions
from tests.pool.make import TASK, new_completion, record

TITLE, WORK, HELPER = (
    RequestShape(system=1, opening=1),
    RequestShape(tools=9, system=2, opening=2),
    RequestShape(tools=8, opening=3),
)
LABELS = ["side", "main", "subagent"]


def new_attempt(pool: Pool) -> tuple[int, int]:
    """An attempt of a run: its id and the run's."""
    run = open_run(pool, "r", "train", {})
    [rollout] = open_group(pool, run.id, TASK, 1)
    return open_attempt(pool, rollout.rollout_id, "command")[0].id, run.id


def calls(attempt_id: int, shapes: Sequence[RequestShape | None]) -> list[NewCompletion]:
    return [replace(new_completion(attempt_id), shape=shape) for shape in shapes]


def stored(pool: Pool) -> list[str | None]:
    with pool.read() as connection:
        return list(connection.scalars(select(completions.c.label).order_by(completions.c.id)))


def test_closing_an_attempt_labels_its_completions_and_no_others(pool: Pool) -> None:
    attempt, _ = new_attempt(pool)
    record(pool, calls(attempt, [TITLE, WORK, HELPER]))
    record(pool, calls(open_session(pool, "other").id, [WORK]))
    assert stored(pool) == [None] * 4
    close_attempt(pool, attempt, Ending())
    assert stored(pool) == [*LABELS, None]


def test_attempts_of_a_dead_harness_are_labelled_too(pool: Pool) -> None:
    attempt, run = new_attempt(pool)
    record(pool, calls(attempt, [TITLE, WORK, HELPER]))
    assert close_interrupted(pool, run) == 1
    assert stored(pool) == LABELS


def test_a_label_that_was_written_stays(pool: Pool) -> None:
    attempt, _ = new_attempt(pool)
    record(pool, calls(attempt, [WORK]))
    close_attempt(pool, attempt, Ending())
    with pool.write() as connection:
        connection.execute(completions.update().values(label="side"))
    close_attempt(pool, attempt, Ending())
    assert stored(pool) == ["side"] == [item.label for item in labelled(of_attempt(pool, attempt))]


def test_open_attempts_are_shown_and_exported_with_the_labels_so_far(pool: Pool, tmp_path: Path) -> None:
    attempt, _ = new_attempt(pool)
    record(pool, calls(attempt, [TITLE, WORK, HELPER]))
    lines = show(pool, attempt)[-3:]
    assert all(f"sampled 2, {label}, stop" in line for line, label in zip(lines, LABELS, strict=True))
    assert export(pool, RolloutFilter(run="r", all_attempts=True), "jsonl", tmp_path / "r.jsonl") == 3
    rows = (tmp_path / "r.jsonl").read_text().splitlines()
    assert all(f'"label":"{label}"' in row for row, label in zip(rows, LABELS, strict=True))
    assert stored(pool) == [None] * 3


def test_rows_of_before_labels_have_none(pool: Pool) -> None:
    attempt, _ = new_attempt(pool)
    record(pool, calls(attempt, [None, WORK]))
    close_attempt(pool, attempt, Ending())
    assert stored(pool) == [None, "main"]
    assert "sampled 2, stop" in "\n".join(show(pool, attempt))


@pytest.fixture
def older(database: str) -> str:
    """A pool of schema 0002 with one completion."""
    row: dict[str, Any] = {"attempt_id": 1, "ordinal": 0, "prefix_length": 0, "path_crc": 0, "finish_reason": "stop"}
    row |= {"started_at": 0, "finished_at": 1, "versions": "[]", "reply": "{}"}
    row |= {"prompt_tail": b"", "sampled": b"", "logprobs": b""}
    names = ", ".join(row)
    with create_engine(database).begin() as connection:
        upgrade(connection, "0002")
        key = "insert into attempts (number, key_hash, agent, opened_at) values (0, 'k', 'a', 1)"
        connection.execute(text(key))
        connection.execute(text(f"insert into completions ({names}) values (:{names.replace(', ', ', :')})"), row)
    return database


def test_an_older_pool_is_brought_up_to_date_with_its_rows_unlabelled(older: str) -> None:
    pool = open_pool(older)
    close_attempt(pool, 1, Ending())
    [item] = of_attempt(pool, 1)
    assert (item.shape, item.label) == (None, None)
    pool.close()
