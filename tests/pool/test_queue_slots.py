"""The queue as the dashboard shows it: which slots the next step may take."""

import pytest
from sqlalchemy import update

from proxy.pool.browse.queue import queue, window_end
from proxy.pool.database import Pool
from proxy.pool.processes.owners import TRAINER, owned
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import note_lease, open_run, set_queue_limit
from proxy.pool.schema import policy_versions
from proxy.pool.training.steps import Published, publish
from proxy.pool.training.windowed_fifo import LeaseRule, pick
from tests.pool.make import TASK

D, R = "DONE", "RUNNING"


@pytest.mark.parametrize("window", [3, None])
def test_the_slots_in_the_window_are_those_that_a_step_may_take(pool: Pool, window: int | None) -> None:
    run = open_run(pool, "r", "train", {})
    publish(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    assert (queue(pool, run.id).step_groups, queue(pool, run.id).window) == (None, None)
    members = [open_group(pool, run.id, TASK | {"id": str(number)}, 1)[0] for number in range(6)]
    for number in (1, 4):  # the oldest still runs
        finish_rollout(pool, members[number].rollout_id, Outcome(attempt_id=None, reward=1.0))
    note_lease(pool, run.id, 1, window)
    now = queue(pool, run.id)
    assert (now.step_groups, now.window) == (1, window)
    assert [slot.in_window for slot in now.slots] == [True] * 3 + [window is None] * 3
    rule = LeaseRule(groups=2, window=window, max_staleness=9)
    taken, _ = pick([(slot.position, slot.state) for slot in now.slots], rule)
    assert taken == ([] if window else [1, 4])  # the second one that is done lies behind the window


@pytest.mark.parametrize(
    ("states", "groups", "window", "takes"),
    [
        ([R, D, R, D, D], 2, 3, 3),  # the window stands at the oldest one
        ([D, D, R, R, D, R], 8, 3, 5),  # the step takes the two at its beginning, so it begins behind them
        ([D] * 6, 4, 3, 4),  # the step takes these four
        ([D, D, D], 8, 3, 3),
        ([R] * 4, 2, None, 4),
    ],
)
def test_the_window_is_where_the_next_step_may_take_groups(
    states: list[str], groups: int, window: int | None, takes: int
) -> None:
    slots = list(enumerate(states))
    end = window_end(slots, groups, window)
    assert sum(position < end for position, _ in slots) == takes
    # as pick does it, where those that run become done one after the other, oldest last
    for position, state in reversed(slots):
        if state == R and position < end:
            slots[position] = (position, D)
    rule = LeaseRule(groups=min(groups, takes), window=window, max_staleness=0)
    taken = pick(slots, rule)[0]
    assert taken and all(position < end for position in taken)


def test_a_full_queue_that_fills_no_step_waits_for_rollouts(pool: Pool) -> None:
    """Also where the oldest groups are done, as in synchronous runs."""
    run = open_run(pool, "r", "train", {})
    publish(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    with pool.write() as connection:
        connection.execute(update(policy_versions).values(pushed_at=1.0))
    set_queue_limit(pool, run.id, 4)
    note_lease(pool, run.id, 4, 4)
    members = [open_group(pool, run.id, TASK | {"id": str(number)}, 1)[0] for number in range(4)]
    for number, sentence in enumerate(["the trainer waits for rollouts"] * 3 + ["the harness waits for the trainer"]):
        finish_rollout(pool, members[number].rollout_id, Outcome(attempt_id=None, reward=1.0))
        with owned(pool, run), owned(pool, run, TRAINER):
            assert queue(pool, run.id).waits.startswith(sentence)
        assert queue(pool, run.id).waits == "nobody works at the run"


def test_nobody_trains_an_evaluation_so_nobody_waits_for_it(pool: Pool) -> None:
    run = open_run(pool, "r", "eval", {})
    open_group(pool, run.id, TASK, 1)
    with owned(pool, run):
        assert (queue(pool, run.id).waits, queue(pool, run.id).attended) == ("", True)
