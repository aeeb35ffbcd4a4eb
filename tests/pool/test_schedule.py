"""Windowed FIFO, leases, published steps, rollback."""

import pytest

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.groups import Outcome, finish_rollout, open_group, open_rollouts
from proxy.pool.runs import admission, open_run
from proxy.pool.schedule import Lease, LeaseRule, lease, pick
from proxy.pool.steps import Published, latest, metrics, publish, reopen_after
from tests.pool.make import TASK, finished_group

RULE = LeaseRule(groups=2, window=4, max_staleness=1)


def published(step: int) -> Published:
    return Published(step=step, checkpoint=f"ckpt/{step}", hf_dir=f"hf/{step}", metrics={"reward": 0.5})


def train_run(pool: Pool) -> int:
    run = open_run(pool, "r", "train", {})
    publish(pool, run.id, published(0))
    return run.id


def indices(found: Lease | None) -> list[int]:
    return [] if found is None else [group.queue_index for group in found.groups]


@pytest.mark.parametrize(
    ("states", "window", "taken"),
    [
        ("DDDD", 4, [0, 1]),
        ("RDDD", 4, [1, 2]),
        ("RRRD", 3, []),  # the finished one is outside the window
        ("RDRD", 4, [1, 3]),
        ("DRRRD", 4, [0, 4]),  # taking the head slides the window to 1..4
        ("DRRRRD", 4, []),
        ("CTDLD", 2, [2, 4]),  # consumed, buried and leased groups do not hold the window
        ("D", 4, []),  # not enough for a step
    ],
)
def test_pick(states: str, window: int, taken: list[int]) -> None:
    names = {"R": "RUNNING", "D": "DONE", "C": "CONSUMED", "T": "TOMBSTONE", "L": "LEASED"}
    queue = [(index, names[state]) for index, state in enumerate(states)]
    assert pick(queue, LeaseRule(groups=2, window=window, max_staleness=0)) == taken


def test_a_window_that_could_never_fill_is_refused() -> None:
    with pytest.raises(UserError, match="window = 1 is smaller than groups = 2"):
        LeaseRule(groups=2, window=1, max_staleness=0)


def test_a_lease_repeats_until_the_step_is_published(pool: Pool) -> None:
    run_id = train_run(pool)
    for _ in range(4):
        finished_group(pool, run_id, [1.0, 0.0])
    assert indices(lease(pool, run_id, 1, RULE)) == [0, 1]
    assert indices(lease(pool, run_id, 1, RULE)) == [0, 1]
    publish(pool, run_id, published(1))
    assert indices(lease(pool, run_id, 2, RULE)) == [2, 3]
    publish(pool, run_id, published(2))
    assert lease(pool, run_id, 3, RULE) is None


def test_publishing_twice_makes_one_version(pool: Pool) -> None:
    run_id = train_run(pool)
    assert publish(pool, run_id, published(1)) == publish(pool, run_id, published(1)) == latest(pool, run_id)
    assert metrics(pool, run_id) == [{"step": 0, "reward": 0.5}, {"step": 1, "reward": 0.5}]


def test_stale_groups_are_dropped_at_the_lease(pool: Pool) -> None:
    run_id = train_run(pool)
    finished_group(pool, run_id, [1.0, 0.0], version="v1")
    publish(pool, run_id, published(1))
    publish(pool, run_id, published(2))
    for _ in range(3):
        finished_group(pool, run_id, [1.0, 0.0], version="v3")
    assert lease(pool, run_id, 3, RULE) is not None
    assert indices(lease(pool, run_id, 3, RULE)) == [1, 2]
    assert admission(pool, run_id).open_groups == 1


def test_completions_of_unknown_versions_are_not_trained(pool: Pool) -> None:
    run_id = train_run(pool)
    finished_group(pool, run_id, [1.0, 0.0], version="default")
    finished_group(pool, run_id, [1.0, 0.0])
    finished_group(pool, run_id, [1.0, 0.0])
    assert indices(lease(pool, run_id, 1, RULE)) == [1, 2]


def test_a_missing_reward_stays_missing_and_half_is_too_few(pool: Pool) -> None:
    run_id = train_run(pool)
    finished_group(pool, run_id, [1.0, None])
    finished_group(pool, run_id, [1.0, 0.0, None])
    finished_group(pool, run_id, [1.0, 0.0])
    found = lease(pool, run_id, 1, RULE)
    assert found is not None and indices(found) == [1, 2]
    assert [(member.reward, member.failure) for member in found.groups[0].rollouts][2] == (None, "verifier")


def test_going_back_reopens_the_later_batches_unchanged(pool: Pool) -> None:
    run_id = train_run(pool)
    for _ in range(4):
        finished_group(pool, run_id, [1.0, 0.0])
    for step in (1, 2):
        lease(pool, run_id, step, RULE)
        publish(pool, run_id, published(step))
    before = latest(pool, run_id)
    assert reopen_after(pool, run_id, 1) == 2
    assert indices(lease(pool, run_id, 2, RULE)) == [2, 3]
    after = publish(pool, run_id, published(2))
    assert before is not None and after.id > before.id


def test_a_resumed_run_finds_its_open_rollouts_and_a_second_outcome_is_ignored(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    first, second = open_group(pool, run.id, TASK, 2)
    finish_rollout(pool, first.rollout_id, Outcome(attempt_id=None, reward=1.0))
    finish_rollout(pool, first.rollout_id, Outcome(attempt_id=None, reward=0.0))
    assert open_rollouts(pool, run.id) == [second]


def test_a_run_takes_its_configuration_from_the_first_that_has_one(pool: Pool) -> None:
    opened = open_run(pool, "r", "train", None)
    assert open_run(pool, "r", "train", {"n": 2}).id == opened.id
    assert open_run(pool, "r", "train", None).config == {"n": 2}
    with pytest.raises(UserError, match=r"started with another n \(2, now 1\)"):
        open_run(pool, "r", "train", {"n": 1})
    with pytest.raises(UserError, match="is a train run, not eval"):
        open_run(pool, "r", "eval", {"n": 2})
