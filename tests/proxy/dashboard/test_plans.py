"""What the pages ask of a pool reads few rows, however many the pool holds, on both databases."""

import re
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import insert, select, text

from benchmarks.pool import TASK, fill, finish_group
from proxy.pool.browse.attempts.acts import attempt_events
from proxy.pool.browse.attempts.attempt import attempt_view, calls_page
from proxy.pool.browse.attempts.conversation import conversation, reply_piece
from proxy.pool.browse.changes import marks
from proxy.pool.browse.evaluated import evaluation_matrix
from proxy.pool.browse.groups import group_view, groups_page
from proxy.pool.browse.machines import machines
from proxy.pool.browse.queue import queue
from proxy.pool.browse.rewards import run_rewards
from proxy.pool.browse.rollout import rollout_view
from proxy.pool.browse.runs import alarms, run_entry, run_names, runs_page
from proxy.pool.browse.sessions import sessions_page
from proxy.pool.browse.steps import curves, metric_names
from proxy.pool.browse.tokens.page import token_page
from proxy.pool.database import Pool, open_pool
from proxy.pool.inspect.account import account
from proxy.pool.inspect.rule_states import SHOWN, rule_states
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import interventions, tasks
from proxy.pool.search.behaviour import run_behaviour
from proxy.pool.search.build import progress
from proxy.pool.search.index import open_writer
from proxy.pool.search.query import HITS, WALK, Hit, Wanted, search
from proxy.pool.search.results import found
from proxy.pool.training.evaluations import open_evaluation
from proxy.pool.training.interventions import history_of
from proxy.pool.training.steps import versions
from tests.pool.test_plans import watched
from tests.proxy.dashboard.make import metrics

MIDDLE = 0.4
"""Where in the pool the rows lie that are looked at."""
INDEXED = 50_000
"""Calls and rollouts of a search index."""
MOST_INDEX_INSTRUCTIONS = 600_000
"""Instructions of SQLite's virtual machine for one question to a search index; reading all of it takes more."""


def filled(pool: Pool, rows: int) -> int:
    """A run with so many groups, metrics for each of its steps, some open groups, and evaluations of it."""
    run_id = fill(pool, rows)
    given = {"metrics": msgspec.json.encode(metrics(3)).decode()}
    value = ":metrics" if pool.dialect == "sqlite" else "cast(:metrics as json)"
    with pool.write() as connection:
        connection.execute(
            text(f"insert into train_steps (version_id, metrics) select id, {value} from policy_versions"), given
        )
    for _ in range(5):
        finish_group(pool, run_id, "v1", members=8, calls=8, tokens=100)
    evaluate(pool, run_id)
    drop_all(pool, run_id)
    if pool.dialect == "postgresql":
        with pool.write() as connection:
            connection.execute(text("analyze"))
    return run_id


def evaluate(pool: Pool, run_id: int) -> None:
    """Two evaluations of a run, each at a trained task and at two that are held out."""
    run = find_run(pool, "long")
    assert run.id == run_id
    for version in versions(pool, run_id)[:2]:
        evaluation = open_evaluation(pool, run, version, {}, engine="", rollouts=3)
        for task in (TASK, TASK | {"id": "a", "instruction": "a"}, TASK | {"id": "b", "instruction": "b"}):
            [member] = open_group(pool, evaluation.run_id, task, 1)
            finish_rollout(pool, member.rollout_id, Outcome(attempt_id=None, reward=0.5))


def drop_all(pool: Pool, run_id: int) -> None:
    """An intervention for each task of a run: more can hardly be done to it."""
    with pool.write() as connection:
        ids = connection.scalars(select(tasks.c.id).where(tasks.c.run_id == run_id)).all()
        done = {"run_id": run_id, "at": 1.0, "rule": "hacking", "action": "drop_task", "detail": "it was cheated"}
        connection.execute(insert(interventions), [done | {"task_id": id} for id in ids])


def operations(pool: Pool, run_id: int, rows: int) -> dict[str, Callable[[], Any]]:
    """What the pages ask."""
    one = int(rows * MIDDLE)
    hits = [Hit(rollout_id=id, call=id, attempt_id=id, events=None) for id in range(one, one + HITS)]
    return {
        "runs": lambda: runs_page(pool),
        "alarms": lambda: alarms(pool),
        "run names": lambda: run_names(pool, "o", stepped=True),
        "sessions": lambda: sessions_page(pool),
        "run": lambda: run_entry(pool, "long"),
        "metric names": lambda: metric_names(pool, run_id),
        "curves": lambda: curves(pool, run_id, ["reward_mean", "staleness_tokens"]),
        "rewards": lambda: run_rewards(pool, run_id),
        "evaluations": lambda: evaluation_matrix(pool, run_id),
        "machines": lambda: machines(pool),
        "events": lambda: attempt_events(pool, one),
        "queue": lambda: queue(pool, run_id),
        "account": lambda: account(pool, run_id),
        "groups": lambda: groups_page(pool, "long"),
        "groups in the middle": lambda: groups_page(pool, "long", before=one),
        "groups of a state": lambda: groups_page(pool, "long", state="TOMBSTONE"),
        "groups of a step": lambda: groups_page(pool, "long", step=one // 64),
        "group": lambda: group_view(pool, one),
        "rollout": lambda: rollout_view(pool, one),
        "attempt": lambda: attempt_view(pool, one),
        "calls": lambda: calls_page(pool, one),
        "conversation": lambda: conversation(pool, one),
        "reply": lambda: reply_piece(pool, one),
        "tokens": lambda: token_page(pool, one, 0),
        "what changed": lambda: marks(pool),
        "hits of words": lambda: found(pool, hits, "ok"),
        "hits of filters": lambda: found(pool, [replace(hit, call=None) for hit in hits], ""),
        "rules": lambda: rule_states(pool, run_id),
        "interventions": lambda: history_of(pool, run_id, SHOWN),
    }


def troubles_of(database: str, run_id: int, rows: int) -> dict[str, list[str]]:
    """What is wrong with the plans of the pages' questions, by page."""
    reader = open_pool(database, create=False, read_only=True)
    wrong = {}
    for name, work in operations(reader, run_id, rows).items():
        with watched(reader) as troubles:
            work()
        if troubles:
            wrong[name] = troubles
    reader.close()
    return wrong


def test_no_page_scans_a_table(tmp_path: Path) -> None:
    """PostgreSQL scans small tables, and rightly so; the long test has a large one."""
    pool = open_pool(str(tmp_path / "pool.db"))
    assert troubles_of(pool.url, filled(pool, 3000), 3000) == {}
    pool.close()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_pages_of_a_million_completions_read_few_rows(database: str, pool: Pool) -> None:
    rows = 1_000_000
    assert troubles_of(database, filled(pool, rows), rows) == {}


NUMBERS = (
    "(with recursive numbers(n) as (select 1 union all select n + 1 from numbers where n < ?) select n from numbers)"
)
FILL_INDEX = """
insert into words (rowid, reply, results) select n, 'every word' || (n % 100) || ' item' || n, '' from numbers
insert into calls select n, n, n, 1 + n % 2 from numbers
insert into outcomes select n, 1 + n % 2, n, 'a', 'agent', 't', 0.5, case when n % 50 = 0 then 'hung' end, 3, 9, 1.0, n
    from numbers
insert into events select 'retry_loop', n, 1 from numbers where n % 3 = 0
insert into events select 'tool_failed', n, 1 from numbers
"""


class CountedIndex(sqlite3.Connection):
    """A search index that counts in thousands what its questions cost, also while a question has its own limit."""

    thousands = 0

    def set_progress_handler(self, handler: Callable[[], Any] | None, n: int = 1000) -> None:
        def tick() -> Any:
            self.thousands += 1
            return handler() if handler is not None else 0

        super().set_progress_handler(tick, 1000)


def filled_index(file: Path) -> CountedIndex:
    """A search index with many calls and rollouts of two runs."""
    open_writer(file).close()
    index = sqlite3.connect(file, factory=CountedIndex)
    index.row_factory = sqlite3.Row
    for statement in FILL_INDEX.strip().replace("\n    ", " ").splitlines():
        index.execute(statement.replace("from numbers", f"from {NUMBERS}"), (INDEXED,))
    index.commit()
    return index


def index_questions(index: sqlite3.Connection) -> dict[str, Callable[[], Any]]:
    """What the pages ask of the index: first pages, pages further on, and filters that nothing passes."""
    wanted = {
        "a frequent word": Wanted(words="every"),
        "a rare word": Wanted(words=f"item{INDEXED // 2}"),
        "a beginning of words": Wanted(words="wor*"),
        "a word in a run": Wanted(words="every", run_id=1),
        "a word with an event": Wanted(words="every", event="undo_loop"),
        "the newest": Wanted(),
        "an agent that is not there": Wanted(agent="b"),
        "any failure": Wanted(failure="any"),
        "a failure": Wanted(failure="hung"),
        "a failure in a run without any": Wanted(failure="hung", run_id=2),
        "a run": Wanted(run_id=1),
        "a run with high rewards": Wanted(run_id=1, least_reward=2.0),
        "an event": Wanted(event="retry_loop"),
        "an event in a run that is not there": Wanted(event="tool_failed", run_id=3),
    }
    asked: dict[str, Callable[[], Any]] = {}
    for name, each in wanted.items():
        asked[name] = partial(search, index, each)
        asked[f"{name}, further on"] = partial(search, index, each, int(INDEXED * MIDDLE))
    return asked | {"behaviour": lambda: run_behaviour(index, 1), "how much is in it": lambda: progress(index)}


def scans(index: sqlite3.Connection, statement: str) -> list[str]:
    """The steps of a statement that read a whole table of rows, or all words.

    The newest rollouts without a filter that has an index are the newest rows of their table, up to a limit.
    """
    plan = [row[3] for row in index.execute(f"explain query plan {statement}")]
    walk = f"from outcomes where true order by rollout_id desc limit {WALK}" in statement
    return [
        step
        for step in plan
        if re.match(r"SCAN (calls|events|outcomes|meta)\b", step) and not (walk and step == "SCAN outcomes")
        or re.match(r"SCAN words\b(?!.*:M)", step)
    ]  # fmt: skip


def test_no_question_to_the_search_index_scans_a_table(tmp_path: Path) -> None:
    index = filled_index(tmp_path / "index")
    wrong: dict[str, list[Any]] = {}
    for name, work in index_questions(index).items():
        asked: list[str] = []
        index.set_progress_handler(None)
        index.thousands = 0
        index.set_trace_callback(asked.append)
        work()
        index.set_trace_callback(None)
        if 1000 * index.thousands > MOST_INDEX_INSTRUCTIONS:
            wrong.setdefault(name, []).append(f"{index.thousands},000 instructions")
        assert asked
        for statement in asked:
            if not statement.startswith("--"):  # what FTS5 asks of its own tables
                wrong.setdefault(name, []).extend(scans(index, statement))
    index.close()
    assert {name: troubles for name, troubles in wrong.items() if troubles} == {}
