"""The queue as the dashboard shows it: which slots the next step may take."""

import pytest

from proxy.pool.browse.queue import queue
from proxy.pool.database import Pool
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import note_lease, open_run
from proxy.pool.training.steps import Published, publish
from proxy.pool.training.windowed_fifo import LeaseRule, pick
from tests.pool.make import TASK


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
