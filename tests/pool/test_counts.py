"""Figures of a rollout's attempt, on the rollout's row: when they are written, and that a lease judges from them."""

from typing import Any

import pytest
from sqlalchemy import create_engine, select, update

from proxy.pool.database import Pool
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.counts import count, keep_tokens
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import completions, groups, metadata, rollouts
from proxy.pool.training.steps import Published, publish
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.pool.make import TASK, finished_group, new_completion, record

RULE = LeaseRule(groups=1, window=4, max_staleness=0)
COLUMNS = (rollouts.c.completions, rollouts.c.sampled_tokens, rollouts.c.trainable_tokens, rollouts.c.versions)


@pytest.fixture
def run_id(pool: Pool) -> int:
    run = open_run(pool, "r", "train", {})
    publish(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    return run.id


def counts(pool: Pool) -> list[tuple[object, ...]]:
    with pool.read() as connection:
        return [tuple(row) for row in connection.execute(select(*COLUMNS).order_by(rollouts.c.id))]


def test_an_outcome_brings_the_figures_of_its_closed_attempt(pool: Pool, run_id: int) -> None:
    members = open_group(pool, run_id, TASK, 4)
    answers: list[list[list[int]]] = [[], [[3, 4], [5]], [[6]], [[7]]]
    for member, sampled in zip(members, answers, strict=True):
        attempt, _ = open_attempt(pool, member.rollout_id, "command")
        items = [new_completion(attempt.id, sampled=tokens) for tokens in sampled]
        ids = record(pool, items) if items else []
        with pool.write() as connection:  # the last one of each is not trained
            failed = completions.c.id.in_(ids[1:])
            connection.execute(
                update(completions).where(failed).values(untrainable="abandoned", versions=[["v9", 0, 1]])
            )
        if member is not members[3]:
            close_attempt(pool, attempt.id, Ending())
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=1.0))
    still_open = (None, None, None, None)
    assert counts(pool) == [(0, 0, 0, []), (2, 3, 2, ["v1"]), (1, 1, 1, ["v1"]), still_open]
    record(pool, [new_completion(attempt.id)])  # so it can still grow
    close_attempt(pool, attempt.id, Ending())
    assert lease(pool, run_id, 1, RULE) is not None
    assert counts(pool)[3] == (2, 3, 3, ["v1"])


def test_a_lease_reads_no_completion_of_groups_that_it_does_not_take(pool: Pool, run_id: int) -> None:
    for version in ("v1", "other", "v1"):
        finished_group(pool, run_id, [1.0, 0.0], version=version)
    with pool.write() as connection:  # reading these would raise
        unread = completions.c.attempt_id.in_(select(rollouts.c.attempt_id).where(rollouts.c.group_id != 1))
        connection.execute(update(completions).where(unread).values(untrainable="unheard of"))
    taken = lease(pool, run_id, 1, RULE)
    assert taken is not None and [group.group_id for group in taken.groups] == [1]
    with pool.read() as connection:
        rows = connection.execute(select(groups.c.state, groups.c.reason, groups.c.detail).order_by(groups.c.id)).all()
    unusable = Untrained(UntrainedReason.TOO_FEW_VALID, "0 of 2 rollouts are usable")
    assert [(row.state, Untrained.from_columns(*row[1:])) for row in rows] == [
        ("LEASED", None), ("TOMBSTONE", unusable), ("DONE", None),
    ]  # fmt: skip


def test_rollouts_of_before_there_were_figures_are_judged_as_ever_and_get_them(pool: Pool, run_id: int) -> None:
    finished_group(pool, run_id, [1.0, 0.0], version="other")
    finished_group(pool, run_id, [1.0, None])
    finished_group(pool, run_id, [1.0, 0.0])
    after = counts(pool)
    with pool.write() as connection:
        none = dict.fromkeys(column.name for column in COLUMNS)
        connection.execute(update(rollouts).values(none))
    taken = lease(pool, run_id, 1, RULE)
    assert taken is not None and [group.queue_index for group in taken.groups] == [2]
    assert counts(pool)[4:] == after[4:] == [(1, 2, 2, ["v1"])] * 2 and counts(pool)[:2] == after[:2]


def test_the_queries_that_count_are_compiled_once() -> None:
    """SQLAlchemy keeps no query with an element whose key it does not know, and says nothing: it compiles each anew."""
    engine, compiled = create_engine("sqlite://"), dict[Any, Any]()
    metadata.create_all(engine)
    with engine.connect().execution_options(compiled_cache=compiled) as connection:
        for attempt_id in (1, 2, 3):
            count(connection, [attempt_id])
            keep_tokens(connection, [attempt_id])
    assert len(compiled) == 2
