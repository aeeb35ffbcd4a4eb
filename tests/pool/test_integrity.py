"""Rollouts that cheated: what the pool keeps of them, who may still learn from them, and where they are shown."""

from dataclasses import replace

from sqlalchemy import update

from proxy.pool.database import Pool
from proxy.pool.inspect.run_behaviour import run_behaviour
from proxy.pool.inspect.run_status import run_status
from proxy.pool.inspect.show import show
from proxy.pool.inspect.trainable_calls import trainable_calls
from proxy.pool.read import rollouts
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group, run_summary
from proxy.pool.rollouts.queue import SETTLED_GROUPS, is_settled
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import rollouts as table
from proxy.pool.training.steps import Published
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from proxy.pool.untrained import Untrained
from tests.pool.make import TASK, finished_group, publish_next

FOUND = {
    "by": ["marker_left"],
    "reward": 1.0,
    "findings": [
        {"detector": "marker_left", "severity": "strong", "quote": "touch /tmp/ok", "completion": 1, "ordinal": 0}
    ],
    "judge": {"hacked": True, "reason": "it made the file that is looked at"},
}
RULE = LeaseRule(groups=1, window=1, max_staleness=5)


def hacked(pool: Pool, rollout_id: int, action: str | None) -> None:
    with pool.write() as connection:
        values = {"hacked": action, "integrity": FOUND if action else {"by": [], "reward": 1.0, "findings": []}}
        connection.execute(update(table).where(table.c.id == rollout_id).values(values))


def test_a_masked_rollout_is_out_of_training_and_statistics_and_shown_with_its_evidence(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    publish_next(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    ids = finished_group(pool, run.id, [1.0, 0.0, 0.0, 1.0])
    for id, action in zip(ids, ["mask", "tell", None], strict=False):
        hacked(pool, id, action)
    taken = lease(pool, run.id, 1, RULE)
    assert taken is not None
    [group] = taken.groups
    assert [str(member.untrained) for member in group.rollouts] == ["hacked: marker_left", "None", "None", "None"]
    assert [member.verdict for member in group.rollouts] == [None, 0.0, 0.0, 1.0]
    assert [member.hacked for member in group.rollouts] == [True, True, False, None]
    read = list(rollouts(pool))
    assert [str(rollout.completions[0].untrained) for rollout in read] == ["hacked: marker_left", *["None"] * 3]
    assert [rollout.hacked for rollout in read] == ["mask", "tell", None, None]
    [calls] = trainable_calls(pool, run.id).values()
    assert calls.trainable == 3 and {str(why): count for why, count in calls.untrained.items()} == {"hacked": 1}
    assert run_status(pool, run.id).agents["-"].hacked == 2
    assert [row.hacked for row in run_summary(pool, run.id)] == ["mask", "tell", None, None]
    assert run_behaviour(pool, run.id, "step")["1"].means()["hacked"] == 2 / 3
    lines = "\n".join(show(pool, 1))
    assert "hacked (mask), by marker_left; its reward was 1.0" in lines
    assert "strong marker_left at #1: touch /tmp/ok" in lines and "the judge: hacked: it made the file" in lines


def test_groups_that_are_equal_without_the_masked_ones_are_skipped_and_settle_their_task(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    publish_next(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    ids = finished_group(pool, run.id, [1.0, 0.0, 0.0])
    hacked(pool, ids[0], "mask")
    finished_group(pool, run.id, [0.0, 1.0, 0.0])
    taken = lease(pool, run.id, 1, replace(RULE, refill=True))
    assert taken is not None and [group.queue_index for group in taken.groups] == [1]
    assert [str(why) for why in run_reasons(pool)] == ["equal_rewards: all are 0", "None"]
    for _ in range(SETTLED_GROUPS):
        hacked(pool, finished_group(pool, run.id, [1.0, 0.0, 0.0])[0], "mask")
    assert is_settled(pool, run.id, TASK["id"])


def run_reasons(pool: Pool) -> list[Untrained | None]:
    return [rollout.completions[0].untrained for rollout in rollouts(pool)][1::3]


def test_an_outcome_carries_what_was_found(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    [member] = open_group(pool, run.id, TASK, 1)
    parts = {"verifier": 1.0}
    outcome = Outcome(attempt_id=None, reward=0.0, reward_parts=parts, hacked="zero", integrity=FOUND)
    finish_rollout(pool, member.rollout_id, outcome)
    with pool.read() as connection:
        row = connection.execute(table.select()).one()
    assert (row.reward, row.reward_parts, row.hacked, row.integrity) == (0.0, parts, "zero", FOUND)


def test_names_and_reasons_that_are_no_unicode_are_kept_with_a_mark(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    [member] = open_group(pool, run.id, TASK, 1)
    found = FOUND | {"judge": {"hacked": False, "reason": "it wrote \ud800"}}
    parts = {"verifier": 1.0, "\ud800": 0.5}
    finish_rollout(pool, member.rollout_id, Outcome(attempt_id=None, reward=1.0, reward_parts=parts, integrity=found))
    with pool.read() as connection:
        row = connection.execute(table.select()).one()
    assert row.reward_parts == {"verifier": 1.0, "?": 0.5}
    assert row.integrity == FOUND | {"judge": {"hacked": False, "reason": "it wrote ?"}}
