"""Windowed FIFO, leases, published steps, rollback."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sqlalchemy import Connection, select

from proxy.pool.behaviour.process import ProcessRule
from proxy.pool.completions.observed import UNKNOWN_TOOL, Observed
from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.budgets import note_trouble
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group, open_rollouts
from proxy.pool.rollouts.runs import Admission, admission, open_run, set_queue_limit
from proxy.pool.rollouts.scoring import NewScore, write_scores
from proxy.pool.schema import completions, groups, rollouts
from proxy.pool.training import windowed_fifo
from proxy.pool.training.steps import Published, Version, latest, mark_pushed, metrics, reopen_after, scales_before
from proxy.pool.training.unused_groups import before_step, since_last_step
from proxy.pool.training.windowed_fifo import EQUAL, Lease, LeaseRule, lease, pick
from tests.pool.make import TASK, finished_group, new_completion, record
from tests.pool.make import publish_next as publish

VECTORS = json.loads((Path(__file__).parent.parent / "trainer" / "vectors.json").read_text())

RULE = LeaseRule(groups=2, window=4, max_staleness=1)


def published(step: int) -> Published:
    return Published(step=step, checkpoint=f"ckpt/{step}", hf_dir=f"hf/{step}", metrics={"reward": 0.5})


def train_run(pool: Pool) -> int:
    run = open_run(pool, "r", "train", {})
    publish(pool, run.id, published(0))
    return run.id


def indices(taken: Lease | None) -> list[int]:
    return [] if taken is None else [group.queue_index for group in taken.groups]


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
        ("DDR", 1, [0, 1]),  # strictly in order, in a window smaller than the step
        ("DRD", 1, []),
        ("RRRRDRRD", None, [4, 7]),  # without a window
    ],
)
def test_pick(states: str, window: int | None, taken: list[int]) -> None:
    queue = [(index, NAMES[state]) for index, state in enumerate(states)]
    assert pick(queue, LeaseRule(groups=2, window=window, max_staleness=0)) == (taken, [])


@pytest.mark.parametrize(
    ("states", "window", "taken", "skipped"),
    [
        ("EDD", 4, [1, 2], [0]),
        ("DDE", 4, [0, 1], []),  # the batch is full before
        ("EERD", 2, [], [0, 1]),  # without a batch too
        ("REED", 2, [], [1]),  # the head holds the window
        ("DREEED", 3, [], [2, 3]),  # a finished head does not: the step is certain to take it
        ("DEEEEE", 1, [], [1, 2, 3, 4, 5]),  # so the queue goes on where nothing runs
        ("DEED", 1, [0, 3], [1, 2]),  # taken in this order, the window reaches them
    ],
)
def test_groups_that_teach_nothing_are_skipped_within_the_window(
    states: str, window: int, taken: list[int], skipped: list[int]
) -> None:
    queue = [(index, NAMES[state]) for index, state in enumerate(states)]
    assert pick(queue, LeaseRule(groups=2, window=window, max_staleness=0)) == (taken, skipped)


NAMES = {"E": EQUAL, "R": "RUNNING", "D": "DONE", "C": "CONSUMED", "T": "TOMBSTONE", "L": "LEASED"}


def test_the_worked_trace_of_a_queue_of_eight_with_a_window_of_four() -> None:
    """Forge's figure: after each event, what may be taken; the window jumps over what is taken or lost."""
    states = ["R"] * 8
    rule = LeaseRule(groups=1, window=4, max_staleness=0)
    events = "D2:2 D4:2 D7:2 C2: D1:1 C1: D0:0 C0:4 C4: T3:7 D5:5 C5:7 D6:6 C6:7 C7:"
    for event in events.split():
        change, _, eligible = event.partition(":")
        states[int(change[1])] = change[0]
        taken, _ = pick([(index, NAMES[state]) for index, state in enumerate(states)], rule)
        assert taken == [int(index) for index in eligible], event


@pytest.mark.parametrize(
    ("limit", "window", "groups", "lag"),
    [
        (4, 4, 4, 0),
        (16, 1, 4, 3),
        (8, 8, 4, 3),
        (8, 4, 4, 2),
        (8, 4, 1, 10),
        (8, 4, 2, 5),
        (8, 4, 3, 3),
        (16, 5, 4, 4),
        (20, 8, 8, 3),
    ],
)
def test_how_stale_the_queue_can_make_a_group(limit: int, window: int, groups: int, lag: int) -> None:
    """Random orders of finishing stay within floor((N + W - 2) / B) steps, and 0 where N = B; the worst attains it."""
    assert lag == (0 if limit == groups else (limit + window - 2) // groups)
    orders = [Random(seed) for seed in range(12)]
    assert max(greatest_lag(limit, window, groups, order.choice) for order in orders) <= lag
    # Half of the groups are skipped for equal rewards.
    skipping = [greatest_lag(limit, window, groups, order.choice, partial(order.choice, "DE")) for order in orders]
    assert max(skipping) <= lag
    # The worst order: the last group of the first full queue finishes only when nothing else could be taken.
    assert (
        greatest_lag(limit, window, groups, lambda running: next((i for i in running if i != limit - 1), running[0]))
        == lag
    )


def greatest_lag(
    limit: int,
    window: int,
    groups: int,
    next_to_finish: Callable[[list[int]], int],
    outcome: Callable[[], str] = lambda: "D",
) -> int:
    """The most versions that were pushed between the submission of a group and the lease of its batch.

    A leased batch counts as open until its weights are pushed, which takes until nothing else can happen.
    """
    rule = LeaseRule(groups=groups, window=window, max_staleness=0)
    states: list[str] = []
    submitted_at: list[int] = []
    version = most = 0
    while version < 60:
        while len(states) - states.count("C") - states.count("T") < limit:
            states.append("R")
            submitted_at.append(version)
        running = [index for index, state in enumerate(states) if state == "R"]
        batch, skipped = pick([(index, NAMES[state]) for index, state in enumerate(states)], rule)
        if "L" in states:
            states, version = ["C" if state == "L" else state for state in states], version + 1
        elif batch or skipped:
            most = max(most, *(version - submitted_at[index] for index in batch), 0)
            states = ["L" if index in batch else state for index, state in enumerate(states)]
            states = ["T" if index in skipped else state for index, state in enumerate(states)]
        else:
            states[next_to_finish(running)] = outcome()
    return most


def test_strictly_on_policy_nothing_is_dropped_however_long_the_push_takes(pool: Pool) -> None:
    """N = W = B: while a step trains, is published and pushed, no group is opened that only the old weights sample."""
    run_id, batch, steps = open_run(pool, "r", "train", {}).id, 2, 4
    version = publish(pool, run_id, published(0))
    mark_pushed(pool, version)
    set_queue_limit(pool, run_id, batch)
    rule = LeaseRule(groups=batch, window=batch, max_staleness=0)

    def sample(served: Version) -> None:
        """What the harness does: it opens groups where there is room, and engines sample with what they have."""
        while admission(pool, run_id).room:
            finished_group(pool, run_id, [1.0, 0.0], version=served.name)

    for step in range(1, steps + 1):
        sample(version)
        assert lease(pool, run_id, step, rule) is not None
        sample(version)  # while the step trains
        trained = publish(pool, run_id, published(step))
        sample(version)  # while its weights are on the way
        mark_pushed(pool, trained)
        version = trained
    with pool.read() as connection:
        states = connection.scalars(select(groups.c.state)).all()
    assert states == ["CONSUMED"] * (batch * steps)
    reopen_after(pool, run_id, steps - 2)
    assert admission(pool, run_id).open_groups == 2 * batch  # until they are trained and pushed again


@pytest.mark.parametrize(("given", "capacity"), VECTORS["areal_capacity"])
def test_admission_by_staleness_is_that_of_areal(given: list[int], capacity: int) -> None:
    """Equation 3 of arXiv 2505.24298 in our terms: what is consumed is no longer open."""
    version, accepted, running, batch, eta, concurrent = given
    now = Admission(version, None, accepted - version * batch + running, (eta + 1) * batch)
    assert min(concurrent - running, now.room) == capacity


@pytest.mark.parametrize(("number", "admitted"), [(1, True), (4, True), (5, True), (8, True), (9, False)])
def test_the_nth_group_is_admitted_by_the_paper_too(number: int, admitted: bool) -> None:
    batch, version, eta = 4, 0, 1
    assert ((number - 1) // batch <= version + eta) == admitted
    assert (Admission(version, None, number - 1, (eta + 1) * batch).room > 0) == admitted


def test_a_window_of_no_group_is_refused() -> None:
    with pytest.raises(UserError, match="not window = 0"):
        LeaseRule(groups=2, window=0, max_staleness=0)


def test_a_lease_repeats_until_the_step_is_published(pool: Pool) -> None:
    run_id = train_run(pool)
    for _ in range(4):
        finished_group(pool, run_id, [1.0, 0.0])
    note_trouble(pool, 2, "engine_silent: 60 s", 5.0)
    assert indices(lease(pool, run_id, 1, RULE)) == [0, 1]
    taken = lease(pool, run_id, 1, RULE)
    assert taken is not None and indices(taken) == [0, 1]
    assert [[span[0] for span in member.failed_calls] for member in taken.groups[0].rollouts] == [[], [5.0]]
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
    assert admission(pool, run_id).open_groups == 3  # two are leased


def test_groups_of_equal_rewards_make_room_for_others_in_their_turn(pool: Pool) -> None:
    run_id, rule = train_run(pool), replace(RULE, refill=True)
    [head, _] = open_group(pool, run_id, TASK, 2)
    for rewards in ([0.3, 0.1 + 0.2], [1.0, 0.0], [0.0, 0.0, None], [0.0, 0.0]):  # the last is outside of the window
        finished_group(pool, run_id, rewards)
    assert lease(pool, run_id, 1, rule) is None
    with pool.read() as connection:
        query = select(groups.c.state, groups.c.reason, groups.c.detail).order_by(groups.c.queue_index)
        rows = [tuple(row) for row in connection.execute(query)]
    skipped = [("TOMBSTONE", "equal_rewards", f"all are {reward}") for reward in (0.3, 0)]
    assert rows == [("RUNNING", None, None), skipped[0], ("DONE", None, None), skipped[1], ("DONE", None, None)]
    assert admission(pool, run_id).open_groups == 3
    assert since_last_step(pool, run_id) == {"equal_rewards": 2}
    for member in (head.rollout_id, head.rollout_id + 1):
        finish_rollout(pool, member, Outcome(attempt_id=None, reward=None, failure="verifier"))
    finished_group(pool, run_id, [1.0, 0.0])
    assert indices(lease(pool, run_id, 1, rule)) == indices(lease(pool, run_id, 1, rule)) == [2, 5]
    assert since_last_step(pool, run_id) == {"equal_rewards": 3, "too_few_valid": 1}
    one = publish(pool, run_id, published(1))
    assert since_last_step(pool, run_id) == {}
    assert before_step(pool, one) == {"equal_rewards": 3, "too_few_valid": 1}
    for _ in range(2):
        finished_group(pool, run_id, [0.5, 0.5])
    assert indices(lease(pool, run_id, 2, RULE)) == [6, 7]  # without refill they are trained


@pytest.mark.parametrize(("found", "written"), [((0.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (0.0, 0.0))])
def test_a_group_that_is_scored_again_during_a_lease_is_left_for_the_next(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, found: tuple[float, ...], written: tuple[float, ...]
) -> None:
    run_id, rule, assess = train_run(pool), replace(RULE, refill=True, groups=1), windowed_fifo._assess
    members = finished_group(pool, run_id, found)
    scores = {id: NewScore(reward=reward, parts={}) for id, reward in zip(members, written, strict=True)}

    def then_rescore(connection: Connection, run_id: int, rule: LeaseRule) -> Any:
        assessed = assess(connection, run_id, rule)
        assert write_scores(pool, run_id, "judge", scores).rollouts == 2
        return assessed

    with monkeypatch.context() as during:
        during.setattr(windowed_fifo, "_assess", then_rescore)
        assert lease(pool, run_id, 1, rule) is None
    with pool.read() as connection:
        assert connection.scalar(select(groups.c.state)) == "DONE"
    assert indices(lease(pool, run_id, 1, rule)) == ([0] if written == (0.0, 1.0) else [])
    assert since_last_step(pool, run_id) == ({} if written == (0.0, 1.0) else {"equal_rewards": 1})


def test_equal_rewards_are_kept_where_process_rewards_differ(pool: Pool) -> None:
    """The first of these groups differs in a part of a reward, the second in what a call did, the third in neither."""
    run_id = train_run(pool)
    process = ProcessRule(labels=("main",), factor=1.0, bound=0.2, penalties={"tool_errors": 0.1})
    rule = replace(RULE, refill=True, process=process, groups=1, max_staleness=9)
    for parts, fault in (({"turn:0": 0.1}, ""), ({}, UNKNOWN_TOOL), ({"style": 0.5}, "")):
        for number, member in enumerate(open_group(pool, run_id, TASK, 2)):
            attempt, _ = open_attempt(pool, member.rollout_id, "command")
            call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
            reply = {"role": "assistant", "content": None, "tool_calls": [call]}
            shown = Observed(faults=(fault,) if fault and number else ())
            record(pool, [replace(new_completion(attempt.id), reply=reply, observed=shown)])
            close_attempt(pool, attempt.id, Ending())
            outcome = Outcome(attempt_id=attempt.id, reward=1.0, reward_parts=parts if number else {})
            finish_rollout(pool, member.rollout_id, outcome)
    assert indices(lease(pool, run_id, 1, rule)) == [0]
    publish(pool, run_id, published(1))
    assert indices(lease(pool, run_id, 2, rule)) == [1]
    publish(pool, run_id, published(2))
    assert lease(pool, run_id, 3, rule) is None and lease(pool, run_id, 3, rule) is None
    assert since_last_step(pool, run_id) == {"equal_rewards": 1}
    with pool.read() as connection:
        kept = connection.scalars(select(rollouts.c.behaviour).order_by(rollouts.c.id)).all()
    assert kept[2:4] == [[[0, None, [], 2, False]], [[0, None, [1, 0, 0], 2, False]]]


def test_a_stale_member_may_leave_its_group_behind(pool: Pool) -> None:
    run_id = train_run(pool)
    publish(pool, run_id, published(1))
    publish(pool, run_id, published(2))
    finished_group(pool, run_id, [1.0, 0.0], version=["v1", "v3"])
    finished_group(pool, run_id, [1.0, 0.0, None], version=["v1", "v1", "v3"])  # its fresh member has no verdict
    finished_group(pool, run_id, [1.0, 0.0], version=["v2", "v3"])
    taken = lease(pool, run_id, 3, replace(RULE, stale="member"))
    assert taken is not None and indices(taken) == [0, 2]
    assert [[member.staleness for member in group.rollouts] for group in taken.groups] == [[2, 0], [1, 0]]
    assert [group.staleness for group in taken.groups] == [2, 1]


@pytest.mark.parametrize(("allowed", "kept"), [(4, True), (3, False)])
def test_the_oldest_version_of_a_rollout_counts_and_the_bound_itself_is_kept(
    pool: Pool, allowed: int, kept: bool
) -> None:
    """GLM-5's filter, worked: versions 3, 5 and 6 seen at 7."""
    run_id = train_run(pool)
    for step in range(1, 8):
        publish(pool, run_id, published(step))
    first, second = open_group(pool, run_id, TASK, 2)
    spans = {first.rollout_id: [["v4", 0, 1], ["v6", 1, 2]], second.rollout_id: [["v7", 0, 2]]}  # v1 is of step 0
    for rollout_id, versions in spans.items():
        attempt, _ = open_attempt(pool, rollout_id, "command")
        row = to_row(new_completion(attempt.id)) | {"ordinal": 0, "versions": versions}
        with pool.write() as connection:
            insert_row(connection, completions, row)
        outcome = Outcome(attempt_id=attempt.id, reward=float(rollout_id % 2), reward_parts={"turn:0": 0.5})
        finish_rollout(pool, rollout_id, outcome)
    taken = lease(pool, run_id, 8, LeaseRule(groups=1, window=1, max_staleness=allowed))
    assert (taken is not None) == kept
    if taken is not None:
        assert [(one.staleness, one.parts) for one in taken.groups[0].rollouts] == [
            (4, {"turn:0": 0.5}),
            (1, {"turn:0": 0.5}),
        ]


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
    taken = lease(pool, run_id, 1, RULE)
    assert taken is not None and indices(taken) == [1, 2]
    assert str(taken.groups[0].rollouts[2].untrained) == "rollout_failed: verifier"


def test_going_back_reopens_the_later_batches_unchanged(pool: Pool) -> None:
    run_id = train_run(pool)
    for _ in range(4):
        finished_group(pool, run_id, [1.0, 0.0])
    scales = {step: {"agent": {"mean": 0.1 + step / 3}} for step in (1, 2)}
    for step in (1, 2):
        lease(pool, run_id, step, RULE)
        publish(pool, run_id, replace(published(step), scales=scales[step]))
    before = latest(pool, run_id)
    assert scales_before(pool, run_id, 1) is None and scales_before(pool, run_id, 3) == scales[2]
    assert reopen_after(pool, run_id, 1) == 2
    assert scales_before(pool, run_id, 2) == scales[1] and scales_before(pool, run_id, 3) is None
    assert indices(lease(pool, run_id, 2, RULE)) == [2, 3]
    after = publish(pool, run_id, replace(published(2), scales=scales[1]))
    assert before is not None and after.id > before.id and scales_before(pool, run_id, 3) == scales[1]


def test_going_back_keeps_what_the_retired_versions_sampled_for_later_steps(pool: Pool) -> None:
    run_id, taken = train_run(pool), []
    for step in (1, 2, 3):
        for _ in range(2):
            finished_group(pool, run_id, [1.0, 0.0], version=f"v{step}")
        taken.append(lease(pool, run_id, step, RULE))
        publish(pool, run_id, published(step))
    reopen_after(pool, run_id, 1)
    for step, before in zip((2, 3), taken[1:], strict=True):
        assert lease(pool, run_id, step, RULE) == before
        publish(pool, run_id, published(step))
    finished_group(pool, run_id, [1.0, 0.0], version="v4")  # of the step that was taken back
    finished_group(pool, run_id, [1.0, 0.0], version="v6")
    finished_group(pool, run_id, [1.0, 0.0], version="v6")
    assert indices(lease(pool, run_id, 4, RULE)) == [7, 8]


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
