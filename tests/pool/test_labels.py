"""Labels in the pool: written when an attempt closes, worked out before that, absent from earlier rows."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, select, text

from proxy.pool.completions.labels import ASIDE, _Conversations, labels
from proxy.pool.completions.labels import LABELS as LABELS_OF_ALL
from proxy.pool.completions.records import NewCompletion, RequestShape
from proxy.pool.completions.store import labelled, of_attempt
from proxy.pool.database import Pool, open_pool, upgrade
from proxy.pool.export.files import export
from proxy.pool.inspect.show import show
from proxy.pool.processes.owners import owned
from proxy.pool.read import RolloutFilter
from proxy.pool.rollouts.attempts import Ending, close_attempt, close_interrupted, open_attempt, open_session
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import find_run, open_run
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


@dataclass(frozen=True)
class Asked:
    """What a label depends on."""

    id: int
    shape: RequestShape
    finish_reason: str = "stop"


class Plainly(_Conversations):
    """The same rules, where each call is compared with all others."""

    def _forked(self, id: int, before: int) -> bool:
        tools = self._shapes[before].tools
        others = [o for o in self._shapes if self._before[o] == before]
        return self._shapes[id].tools != tools and any(self._shapes[o].tools == tools for o in others)

    def _read(self, id: int) -> int | None:
        shape = self._shapes[id]
        begun = [o for o in self._shapes if o < id and self._before[o] is None and self._roles[o] != ASIDE]
        return next((o for o in begun if self._shapes[o].opening == shape.opening), shape.quotes)


def test_labels_are_those_of_a_plain_comparison() -> None:
    """Of random attempts, most of which no agent would make. The seed is fixed."""
    chance, seen = random.Random(4), set[str]()
    for _ in range(3000):
        asked: list[Asked] = []
        for id in range(1, chance.randint(2, 12)):
            before = chance.choice([None, *asked])
            opening = chance.randint(1, 3) if before is None or chance.random() < 0.2 else before.shape.opening
            shape = RequestShape(
                tools=chance.randint(0, 2),
                system=chance.randint(0, 1),
                opening=opening,
                turns=before.shape.turns + 1 if before else 0,
                continues=before.id if before else None,
                quotes=chance.choice([None, *(each.id for each in asked)]),
                constrained=chance.random() < 0.2,
            )
            asked.append(Asked(id, shape, chance.choice(["stop", "tool_calls"])))
        acting = {each.id for each in asked if each.finish_reason == "tool_calls"}
        plain = Plainly({each.id: each.shape for each in asked}, acting)
        found = labels(asked)
        assert found == {each.id: plain.label(each.id) for each in asked}, asked
        seen.update(found.values())
    assert seen == set(LABELS_OF_ALL)


class Compared(int):
    """A number that counts how often such numbers are compared."""

    times = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return int.__eq__(self, other)

    def __lt__(self, other: int) -> bool:
        Compared.times += 1
        return int.__lt__(self, other)


@pytest.mark.parametrize(
    "later",
    [
        lambda id: RequestShape(tools=Compared(5 + id), system=1, opening=7, turns=1, continues=1),
        lambda id: RequestShape(system=1, opening=8),
    ],
    ids=["branches with other tools", "asides that begin alike"],
)
def test_long_attempts_are_labelled_in_linear_work(later: Callable[[int], RequestShape]) -> None:
    """It is done inside of the transaction that closes an attempt."""
    first = Asked(Compared(1), RequestShape(tools=Compared(5), system=1, opening=7))
    Compared.times = 0
    found = labels([first, *(Asked(Compared(id), later(id)) for id in range(2, 20_000))])
    assert len(found) == 19_999 and Compared.times < 30 * 20_000


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
    with owned(pool, find_run(pool, "r")) as claim:
        assert close_interrupted(pool, run, claim.token) == 1
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
