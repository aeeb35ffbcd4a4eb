"""What the monitor does to a run in the pool: discarded steps, dropped tasks, pauses."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.engine import Engine

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.account import account
from proxy.pool.inspect.rule_states import SHOWN, monitor_lines
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import GroupOptions, called_off, dropped_tasks, open_group
from proxy.pool.rollouts.runs import admission, open_run, set_queue_limit
from proxy.pool.schema import groups
from proxy.pool.training.interventions import (
    Cause,
    discard_after,
    done_for,
    drop_tasks,
    go_on,
    history_of,
    pause,
    paused,
    rollbacks_of,
)
from proxy.pool.training.steps import Published, publish
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.pool.make import TASK, finished_group

STEP = Published(step=0, checkpoint="c", hf_dir="h", metrics={})
RULE = LeaseRule(groups=1, window=8, max_staleness=9)
CAUSE = Cause("collapse", "step 2: it fell", version_id=3)


def test_a_discarded_step_and_what_its_weights_have_sampled_are_never_trained(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    version = first = publish(pool, run.id, STEP)
    for step in (1, 2):
        finished_group(pool, run.id, [1.0, 0.0], version.name)
        assert lease(pool, run.id, step, RULE) is not None
        version = publish(pool, run.id, replace(STEP, step=step, parent=version.id))
    assert version.step == 2
    old, new = first.name, version.name
    finished_group(pool, run.id, [1.0, 0.0, 1.0], [new, new, old])  # most of it is of the weights that go
    finished_group(pool, run.id, [1.0, 0.0, 1.0], [old, new, old])
    open_group(pool, run.id, TASK, 1)
    assert discard_after(pool, run.id, 1, CAUSE) == 1
    assert discard_after(pool, run.id, 1, CAUSE) == 0
    for _ in range(2):  # the second time, its group is LEASED
        leased = lease(pool, run.id, 2, RULE)
        assert leased is not None
        [group] = leased.groups
        assert [member.untrained for member in group.rollouts] == [None, Untrained(UntrainedReason.ROLLED_BACK), None]
    with pool.read() as connection:
        rows = connection.execute(select(groups.c.state, groups.c.step, groups.c.reason).order_by(groups.c.id)).all()
    assert list(map(tuple, rows)) == [
        ("CONSUMED", 1, None),
        ("TOMBSTONE", None, "discarded"),
        ("TOMBSTONE", None, "rolled_back"),
        ("LEASED", 2, None),
        ("RUNNING", None, None),
    ]
    assert {reason: tally.rollouts for reason, tally in account(pool, run.id).left_out.items()} == {
        "discarded: collapse": 2,
        "rolled_back": 3,
    }
    assert rollbacks_of(pool, run.id, "collapse") == 2 and rollbacks_of(pool, run.id, "other") == 0
    assert done_for(pool, run.id, "collapse", 3) and not done_for(pool, run.id, "collapse", 4)


def test_a_dropped_task_is_called_off_and_opened_no_more(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    other = TASK | {"id": "other"}
    finished_group(pool, run.id, [1.0, 0.0])
    running = open_group(pool, run.id, TASK, 2)
    attempt, _ = open_attempt(pool, running[0].rollout_id, "command")
    [held_out] = open_group(pool, run.id, TASK, 1, GroupOptions(held_out=True))
    [kept] = open_group(pool, run.id, other, 1)
    cause = Cause("cheated", "by half of its rollouts")
    assert (
        drop_tasks(pool, run.id, ["t", "never seen"], cause) == ["t"] and drop_tasks(pool, run.id, ["t"], cause) == []
    )
    ids = [*(member.rollout_id for member in running), held_out.rollout_id, kept.rollout_id]
    assert called_off(pool, ids) == ids[:2] and dropped_tasks(pool, run.id) == {"t"}
    assert admission(pool, run.id).dropped_tasks == 1 and admission(pool, run.id).open_groups == 1
    assert open_group(pool, run.id, TASK, 2) == [] and len(open_group(pool, run.id, other, 2)) == 2
    assert len(open_group(pool, run.id, TASK, 1, GroupOptions(held_out=True))) == 1
    with pytest.raises(UserError):
        open_attempt(pool, running[1].rollout_id, "command")
    with pool.read() as connection:
        query = select(groups.c.state, groups.c.reason, groups.c.detail).order_by(groups.c.id)
        rows = list(map(tuple, connection.execute(query).all()))
    dropped, open_ = ("TOMBSTONE", "discarded", "cheated"), ("RUNNING", None, None)
    assert rows == [dropped, dropped, open_, open_, dropped, open_, open_] and attempt.id
    assert account(pool, run.id).left_out["discarded: cheated"].tokens == 4
    assert [(item.action, item.task) for item in history_of(pool, run.id)] == [("drop_task", "t")]


def test_a_rule_that_advises_is_not_said_to_be_in_alarm(pool: Pool) -> None:
    states = {name: {"level": "alarm", "since": 3, "value": 0.7} for name in ("kl_rollout", "waiting")}
    run = open_run(pool, "r", "train", {})
    publish(pool, run.id, replace(STEP, metrics={"monitor_states": states}))
    assert monitor_lines(pool, run.id) == [
        "monitor: kl_rollout is in alarm since step 3, 0.7",
        "monitor: waiting gives advice since step 3, 0.7",
    ]


def test_a_pause_ends_when_a_person_ends_it(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    set_queue_limit(pool, run.id, 2)
    publish(pool, run.id, STEP)
    assert paused(pool, run.id) == "" and admission(pool, run.id).room == 2 and go_on(pool, run.id) == 0
    discard_after(pool, run.id, 0, CAUSE)
    pause(pool, run.id, CAUSE)
    assert paused(pool, run.id) == "collapse: step 2: it fell"
    assert (admission(pool, run.id).room, admission(pool, run.id).paused) == (0, "collapse")
    assert rollbacks_of(pool, run.id, "collapse") == 0  # the next ones are counted from here
    assert go_on(pool, run.id) == 1 and paused(pool, run.id) == "" and admission(pool, run.id).room == 2
    assert [item.ended_at is None for item in history_of(pool, run.id)] == [True, False]


def test_of_a_long_history_the_database_returns_the_newest(pool: Pool) -> None:
    run, other = (open_run(pool, name, "train", {}) for name in ("r", "s"))
    for number in range(SHOWN + 3):
        pause(pool, run.id, Cause(f"rule {number}", "it fell"))
        pause(pool, other.id, CAUSE)
    rules = [f"rule {number}" for number in range(SHOWN + 3)]
    assert [item.rule for item in history_of(pool, run.id)] == rules
    assert [item.rule for item in history_of(pool, run.id, newest=2)] == rules[-2:]
    with statements() as asked:
        lines = monitor_lines(pool, run.id)
    assert [line.partition(" by ")[2].partition(":")[0] for line in lines] == rules[-SHOWN:]
    [history] = [statement for statement in asked if "FROM interventions" in statement]
    assert "LIMIT" in history


@contextmanager
def statements() -> Iterator[list[str]]:
    """Collect the statements that the block executes."""
    asked: list[str] = []

    def before(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        asked.append(statement)

    event.listen(Engine, "before_cursor_execute", before)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", before)
