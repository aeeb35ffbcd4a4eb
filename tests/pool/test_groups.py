"""What an outcome means for the rest of its group: kept, cancelled, filtered, replaced, held out."""

from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import select

from proxy.pool.database import Pool
from proxy.pool.rollouts.attempts import HasOutcome, by_key, open_attempt
from proxy.pool.rollouts.failures import REPLACED, SPOILED_WINDOW
from proxy.pool.rollouts.groups import (
    GroupOptions,
    OpenRollout,
    Outcome,
    finish_rollout,
    open_group,
    open_rollouts,
    run_summary,
)
from proxy.pool.rollouts.queue import is_settled, lost_groups, opened_in_order, places, replacements, spoiled_of
from proxy.pool.rollouts.runs import admission, open_run
from proxy.pool.schema import groups, rollouts
from proxy.pool.training.finished_rollouts import finished_rollouts
from proxy.pool.training.steps import Published, publish
from proxy.pool.training.windowed_fifo import LeasedRollout, LeaseRule, lease
from tests.pool.make import TASK, new_completion, record
from trainer.credit.advantages import group_relative

WINDOW = 8
RULE = LeaseRule(groups=1, window=WINDOW, max_staleness=1)


@pytest.fixture
def run_id(pool: Pool) -> int:
    run = open_run(pool, "r", "train", {})
    publish(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    return run.id


def worked(pool: Pool, member: OpenRollout) -> int:
    """An attempt with one completion."""
    attempt, _ = open_attempt(pool, member.rollout_id, "command")
    record(pool, [new_completion(attempt.id)])
    return attempt.id


def ended(pool: Pool, member: OpenRollout, reward: float | None, failure: str | None = None) -> tuple[int, ...]:
    """The rollouts that this outcome calls off."""
    return wrote(pool, member, worked(pool, member), reward, failure)


def wrote(
    pool: Pool, member: OpenRollout, attempt_id: int, reward: float | None, failure: str | None = None
) -> tuple[int, ...]:
    parts = {} if reward is None else {"verifier": reward}
    outcome = Outcome(attempt_id=attempt_id, reward=reward, failure=failure, reward_parts=parts)
    return finish_rollout(pool, member.rollout_id, outcome).cancelled


def state(pool: Pool, member: OpenRollout) -> tuple[str, str | None]:
    with pool.read() as connection:
        row = connection.execute(select(groups.c.state, groups.c.failure).where(groups.c.id == member.group_id)).one()
        return row.state, row.failure


def kinds(pool: Pool, run_id: int) -> list[str | None]:
    return [row.failure for row in run_summary(pool, run_id)]


def test_the_first_g_with_a_reward_are_kept_and_the_others_called_off(pool: Pool, run_id: int) -> None:
    first, second, third, fourth = open_group(pool, run_id, TASK, 2, GroupOptions(redundant=2))
    late = worked(pool, first)
    assert ended(pool, third, None, "verifier") == ()
    assert ended(pool, second, 1.0) == ()
    assert ended(pool, fourth, 0.0) == (first.rollout_id,)
    assert state(pool, first) == ("DONE", None) and open_rollouts(pool, run_id) == []
    assert wrote(pool, first, late, 1.0) == ()  # it finished at the same moment: kept, and not counted
    assert kinds(pool, run_id) == ["redundant", None, "verifier", None]
    with pool.read() as connection:
        row = connection.execute(select(rollouts).where(rollouts.c.id == first.rollout_id)).one()
    assert row.reward is None and row.reward_parts == {"verifier": 1.0} and row.attempt_id is not None
    [group] = leased(pool, run_id)
    assert [(member.reward, member.untrained and member.untrained.detail) for member in group] == [
        (None, "redundant"),
        (1.0, None),
        (None, "verifier"),
        (0.0, None),
    ]
    with pytest.raises(HasOutcome):
        open_attempt(pool, first.rollout_id, "command")


def leased(pool: Pool, run_id: int) -> list[list[LeasedRollout]]:
    taken = lease(pool, run_id, 1, RULE)
    return [] if taken is None else [group.rollouts for group in taken.groups]


@pytest.mark.parametrize("failure", ["verifier", "image", "redundant", "engine", "sandbox_start"])
def test_placeholders_never_enter_the_statistics_of_their_group(pool: Pool, run_id: int, failure: str) -> None:
    rewards = [1.0, None, 0.0, 1.0, None]
    members = open_group(pool, run_id, TASK, 5)
    for member, reward in zip(members, rewards, strict=True):
        ended(pool, member, reward, failure if reward is None else None)
    taken = lease(pool, run_id, 1, RULE)
    assert taken is not None
    [group] = taken.groups
    valid = [member.verdict for member in group.rollouts]
    scores, alone = group_relative(valid), group_relative([1.0, 0.0, 1.0])
    assert valid == rewards and scores is not None and alone is not None
    assert [scores[1], scores[4]] == [None, None]
    assert [score for score in scores if score is not None] == pytest.approx(alone)


def test_more_than_half_of_the_size_must_have_a_reward_whatever_is_redundant(pool: Pool, run_id: int) -> None:
    members = open_group(pool, run_id, TASK, 3, GroupOptions(redundant=3))
    for member, reward in zip(members, [None, None, None, None, 1.0, 0.0], strict=True):
        ended(pool, member, reward, "verifier" if reward is None else None)
    assert state(pool, members[0]) == ("DONE", None)
    assert len(leased(pool, run_id)) == 1


def test_one_flake_drops_the_whole_group_and_a_new_one_is_owed(pool: Pool, run_id: int) -> None:
    members = open_group(pool, run_id, TASK, 3, GroupOptions(agent="shell"))
    assert ended(pool, members[0], 1.0) == ()
    assert ended(pool, members[1], None, "hung") == (members[2].rollout_id,)
    assert state(pool, members[0]) == ("TOMBSTONE", "hung") and leased(pool, run_id) == []
    assert kinds(pool, run_id) == [None, "hung", "filtered"]
    [owed] = replacements(pool, run_id, 0)
    assert (owed.task, owed.size) == (TASK, 3)
    assert owed.options == GroupOptions(agent="shell", replaces=members[0].group_id)


def test_a_group_is_replaced_so_often_and_no_more(pool: Pool, run_id: int) -> None:
    [member] = open_group(pool, run_id, TASK, 1)
    ended(pool, member, None, "tool_flake")
    for _ in range(REPLACED):
        [owed] = replacements(pool, run_id, 0)
        assert owed.options.replaces == member.group_id
        [again] = open_group(pool, run_id, owed.task, owed.size, owed.options)
        assert replacements(pool, run_id, 0) == []  # it is open
        ended(pool, again, None, "tool_flake")
    assert replacements(pool, run_id, 0) == []
    assert opened_in_order(pool, run_id) == 1


def test_the_spoiled_rollouts_of_a_task_are_counted_among_its_newest(pool: Pool, run_id: int) -> None:
    for failure in ("spoiled", "spoiled", *["verifier"] * (SPOILED_WINDOW - 2), "spoiled"):
        [member] = open_group(pool, run_id, TASK, 1)
        ended(pool, member, None, failure)
    [other] = open_group(pool, run_id, TASK | {"id": "u"}, 1)
    ended(pool, other, None, "spoiled")
    assert (spoiled_of(pool, run_id, TASK["id"]), spoiled_of(pool, run_id, "u")) == (2, 1)


def test_lost_groups_are_those_of_failures_in_their_domain(pool: Pool, run_id: int) -> None:
    other = TASK | {"id": "u", "domain": "qa"}
    for task, reward, failure in [
        (TASK, 1.0, None),
        (TASK, None, "verifier"),
        (TASK, None, "hung"),
        (TASK, 0.0, "agent_budget"),
        (other, None, "image"),
    ]:
        [member] = open_group(pool, run_id, task, 1)
        ended(pool, member, reward, failure)
    open_group(pool, run_id, TASK, 1)  # is still running
    assert lost_groups(pool, run_id, "agent") == [False, True, True, False]
    assert lost_groups(pool, run_id, "qa") == [True]


def test_a_task_is_settled_when_the_rewards_of_its_last_groups_are_equal(pool: Pool, run_id: int) -> None:
    def finish(rewards: Sequence[float | None], **options: Any) -> bool:
        for member, reward in zip(open_group(pool, run_id, TASK, 2, GroupOptions(**options)), rewards, strict=True):
            ended(pool, member, reward, None if reward is not None else "verifier")
        return is_settled(pool, run_id, TASK["id"])

    assert not is_settled(pool, run_id, "another")
    assert [finish((1.0, 1.0), place=place) for place in (4, 5, 9)] == [False, False, True]
    open_group(pool, run_id, TASK, 2, GroupOptions(place=7, max_tokens=50))  # it runs, so it changes nothing
    assert finish((0.0, 1.0), held_out=True) and not finish((0.0, 0.0))
    assert [finish((0.0, 0.0)) for _ in range(2)] == [False, True]  # never solved
    assert not finish((None, None)) and not is_settled(pool, open_run(pool, "other", "train", {}).id, TASK["id"])
    assert places(pool, run_id) == [4, 5, 9, 7]
    assert [rollout.max_tokens for rollout in open_rollouts(pool, run_id)] == [50, 50]


def test_a_group_that_is_held_out_is_recorded_and_never_queued(pool: Pool, run_id: int) -> None:
    [evaluated] = open_group(pool, run_id, TASK, 1, GroupOptions(agent="codex", held_out=True))
    _, key = open_attempt(pool, evaluated.rollout_id, "codex")
    known = by_key(pool, key)
    assert known is not None and known.purpose == "eval"
    assert admission(pool, run_id).open_groups == 0  # it takes no place of a group that is trained
    [trained] = open_group(pool, run_id, TASK, 1, GroupOptions(agent="opencode"))
    ended(pool, trained, 1.0)  # the older group, which still runs, does not hold it up
    ended(pool, evaluated, 1.0)
    [[member]] = leased(pool, run_id)
    assert member.rollout_id == trained.rollout_id
    assert lease(pool, run_id, 2, RULE) is None
    assert [item.rollout_id for item in finished_rollouts(pool, run_id)] == [trained.rollout_id]
    assert [(row.agent, row.reward) for row in run_summary(pool, run_id)] == [("codex", 1.0), ("opencode", 1.0)]


def test_groups_that_are_held_out_take_no_place_in_the_window(pool: Pool, run_id: int) -> None:
    open_group(pool, run_id, TASK, 1)  # the head of the queue, which runs on
    for _ in range(WINDOW):
        open_group(pool, run_id, TASK, 1, GroupOptions(held_out=True))
    [second] = open_group(pool, run_id, TASK, 1)
    ended(pool, second, 1.0)
    [[member]] = leased(pool, run_id)
    assert member.rollout_id == second.rollout_id
