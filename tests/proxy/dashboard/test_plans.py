"""What the pages ask of a pool reads few rows, however many the pool holds, on both databases."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import text

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
from proxy.pool.browse.runs import run_entry, run_names, runs_page
from proxy.pool.browse.sessions import sessions_page
from proxy.pool.browse.steps import curves, metric_names
from proxy.pool.browse.tokens.page import token_page
from proxy.pool.database import Pool, open_pool
from proxy.pool.inspect.account import account
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.evaluations import open_evaluation
from proxy.pool.training.steps import versions
from tests.pool.test_plans import watched
from tests.proxy.dashboard.make import metrics

MIDDLE = 0.4
"""Where in the pool the rows lie that are looked at."""


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


def operations(pool: Pool, run_id: int, rows: int) -> dict[str, Callable[[], Any]]:
    """What the pages ask."""
    one = int(rows * MIDDLE)
    return {
        "runs": lambda: runs_page(pool),
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
