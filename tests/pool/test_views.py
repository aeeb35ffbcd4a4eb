"""The SQL views: each is read on both databases, counts what the tables hold, and stands in docs/pool.md."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, func, select, text

from proxy.pool.completions.store import of_attempt
from proxy.pool.database import Pool, open_pool, upgrade
from proxy.pool.rollouts.attempts import open_session
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import completions, groups, metadata, rollouts
from proxy.pool.training.steps import Published, publish, reopen_after
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from proxy.pool.views import VIEWS
from tests.pool.make import TASK, finished_group, new_completion, record

PAGE = Path(__file__).parents[2] / "docs" / "pool.md"


def rows(pool: Pool, view: str, order: str) -> list[dict[str, Any]]:
    with pool.read() as connection:
        return [dict(row._mapping) for row in connection.execute(text(f"select * from {view} order by {order}"))]


@pytest.fixture
def filled(pool: Pool) -> Pool:
    """Run r with steps 1 and 2, of which 2 is retired, a dropped group and a running one; run s; a session."""
    run = open_run(pool, "r", "train", {})
    start = Published(step=0, checkpoint="c", hf_dir="m", metrics={})
    version = publish(pool, run.id, start)
    for rewards in ([1.0, 0.0], [1.0, None, 1.0], [None, None, 1.0]):
        finished_group(pool, run.id, rewards)
    for step in (1, 2):
        assert lease(pool, run.id, step, LeaseRule(groups=1, window=4, max_staleness=9))
        version = publish(pool, run.id, replace(start, step=step, parent=version.id))
    reopen_after(pool, run.id, 1)
    [cancelled] = open_group(pool, run.id, TASK, 1)
    finish_rollout(pool, cancelled.rollout_id, Outcome(attempt_id=None, reward=None, failure="redundant"))
    open_group(pool, run.id, TASK, 2)
    open_run(pool, "s", "eval", {})
    record(pool, [new_completion(open_session(pool, "key").id, [1, 2, 3], [4])])
    return pool


def test_the_views_count_what_the_tables_hold(filled: Pool) -> None:
    with filled.read() as connection:
        counts = {table.name: select(func.count()).select_from(table) for table in metadata.sorted_tables}
        numbers = {name: connection.scalar(query) or 0 for name, query in counts.items()}
        by_state: dict[str, int] = dict(
            connection.execute(select(groups.c.state, func.count()).group_by(groups.c.state)).all()  # type: ignore[arg-type]
        )
        mean = connection.scalar(select(func.avg(rollouts.c.reward)))
    r, s = rows(filled, "v_runs", "run")
    assert (r["tasks"], r["groups"], r["rollouts"]) == (numbers["tasks"], numbers["groups"], numbers["rollouts"])
    assert (r["attempts"], r["completions"]) == (numbers["attempts"] - 1, numbers["completions"] - 1)
    states = {name: r[f"groups_{name.lower()}"] for name in ("RUNNING", "LEASED", "CONSUMED")}
    assert states | {"TOMBSTONE": r["groups_dropped"]} == by_state and r["groups_done"] == 0
    assert (r["rewards"], r["reward_mean"], r["step"]) == (5, pytest.approx(mean), 1)
    assert (s["run"], s["purpose"], s["groups"], s["reward_mean"], s["step"]) == ("s", "eval", 0, None, None)

    seen = rows(filled, "v_groups", "group_id")
    assert len(seen) == numbers["groups"] and sum(row["rollouts"] for row in seen) == numbers["rollouts"]
    assert [row["rewards"] for row in seen] == [2, 2, 1, 0, 0] and [row["finished"] for row in seen] == [2, 3, 3, 1, 0]
    first = seen[0]
    assert (first["reward_mean"], first["reward_min"], first["reward_max"], first["held_out"]) == (0.5, 0.0, 1.0, 0)
    assert (seen[2]["state"], seen[2]["reason"]) == ("TOMBSTONE", "too_few_valid")

    members = rows(filled, "v_rollouts", "rollout_id")
    assert len(members) == numbers["rollouts"] and sum(row["completions"] for row in members) == 8
    assert sum(row["sampled_tokens"] or 0 for row in members) == 16
    assert [row["seconds"] is None for row in members] == [False] * 8 + [True] * 3  # of rollouts without an attempt
    assert [row["failure"] for row in members if row["failure"]] == ["verifier"] * 3 + ["redundant"]

    steps = [(row["step"], row["version"], row["groups"], row["rollouts"]) for row in rows(filled, "v_steps", "step")]
    assert steps == [(0, "v1", 0, 0), (1, "v2", 1, 2), (2, "v3", 0, 0)]
    assert rows(filled, "v_steps", "step")[1]["reward_mean"] == 0.5


def test_a_call_has_the_lengths_of_its_arrays(filled: Pool) -> None:
    seen = rows(filled, "v_completions", "completion_id")
    with filled.write() as connection:
        assert len(seen) == connection.scalar(select(func.count()).select_from(completions))
        given = {"given": [[0, 1]], "logprobs": b"\0\0\0\0", "prefix_length": 3}
        connection.execute(completions.update().where(completions.c.id == seen[0]["completion_id"]).values(given))
    first, *_, outside = rows(filled, "v_completions", "completion_id")
    [item] = of_attempt(filled, first["attempt_id"])
    lengths = (first["new_prompt_tokens"], first["prompt_tokens"], first["answer_tokens"], first["sampled_tokens"])
    assert lengths == (len(item.prompt_tail), item.prompt_length, len(item.sampled), item.sampled_count) == (2, 5, 2, 1)
    assert (first["run"], first["task"], first["final"], first["logprobs"]) == ("r", "t", 1, 1)
    assert (outside["run"], outside["rollout_id"], outside["prompt_tokens"], outside["final"]) == (None, None, 3, 0)
    assert outside["seconds"] == pytest.approx(outside["finished_at"] - outside["started_at"])


def test_the_page_lists_every_column(pool: Pool) -> None:
    listed = {
        view: re.findall(r"`(\w+)`", columns)
        for view, columns in re.findall(r"^\| `(v_\w+)` \|[^|]*\|(.*)\|$", PAGE.read_text(), re.M)
    }
    assert listed.keys() == VIEWS.keys()
    for view in VIEWS:
        with pool.read() as connection:
            assert set(connection.execute(text(f"select * from {view}")).keys()) == set(listed[view])


def test_an_upgrade_makes_the_views_again(database: str) -> None:
    """An older pool has views of its time, on columns that a migration renames."""
    engine = create_engine(database)
    with engine.begin() as connection:
        upgrade(connection, "0008")
        for view in VIEWS:
            connection.execute(text(f"create view {view} as select untrainable from completions"))
    engine.dispose()
    pool = open_pool(database)
    assert [rows(pool, view, "run") for view in VIEWS] == [[]] * 5
    open_run(pool, "r", "train", {})
    pool.close()
    again = open_pool(database)
    assert [row["run"] for row in rows(again, "v_runs", "run")] == ["r"]
    again.close()
