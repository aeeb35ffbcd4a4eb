"""Groups that begin with a recorded attempt: which ones there are, what came of them, and where their tokens are."""

from dataclasses import replace

import pytest
from sqlalchemy import update

from proxy.commands.main import main
from proxy.pool.completions.records import NewCompletion
from proxy.pool.database import Pool
from proxy.pool.inspect.account import account, account_lines
from proxy.pool.inspect.show import show
from proxy.pool.inspect.verify import verify
from proxy.pool.read.why_untrained import Surroundings, why_untrained
from proxy.pool.rollouts.attempts import Ending, by_id, by_key, close_attempt, open_attempt
from proxy.pool.rollouts.groups import GroupOptions, OpenRollout, Outcome, finish_rollout, open_group, open_rollouts
from proxy.pool.rollouts.runs import open_run
from proxy.pool.rollouts.starts import (
    RecordedSuccess,
    Start,
    as_replayed,
    left_replay,
    note_differed,
    outcomes,
    replayed,
    solved_tasks,
    successes,
)
from proxy.pool.schema import attempts, completions, groups
from proxy.pool.training.steps import Published, publish
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.pool.make import TASK, new_completion, publish_next, record
from trainer.config.credit import Credit
from trainer.config.step import StepOptions
from trainer.data.assemble import assemble
from trainer.report.left_out import left_out

RULE = LeaseRule(groups=1, window=8, max_staleness=8)


def replay(attempt_id: int, recorded: int) -> NewCompletion:
    """A completion with the answer of a recorded one, as the proxy stores it."""
    item = new_completion(attempt_id)
    return replace(item, given=((0, 2),), logprobs=item.logprobs[:0], versions=(), untrainable=as_replayed(recorded))


def rolled(
    pool: Pool, rollout: OpenRollout, reward: float | None, *, turns: int = 2, replays: tuple[int, ...] = (),
    failure: str | None = None,
) -> int:  # fmt: skip
    """Bring a rollout to its outcome: replayed answers, then sampled turns of two tokens. Returns the attempt's id."""
    attempt, _ = open_attempt(pool, rollout.rollout_id, "command")
    record(pool, [replay(attempt.id, number) for number in replays] + [new_completion(attempt.id)] * turns)
    close_attempt(pool, attempt.id, Ending(failure=failure))
    finish_rollout(pool, rollout.rollout_id, Outcome(attempt_id=attempt.id, reward=reward, failure=failure))
    return attempt.id


def recorded_run(pool: Pool, rewards: tuple[float | None, ...] = (1.0,), turns: int = 3) -> list[int]:
    """A run `old` with a group of these rewards; the attempts' ids."""
    members = open_group(pool, open_run(pool, "old", "collect", {}).id, TASK, len(rewards))
    return [rolled(pool, one, reward, turns=turns) for one, reward in zip(members, rewards, strict=True)]


def test_successes_are_the_attempts_that_can_be_repeated(pool: Pool) -> None:
    solved, _, other = recorded_run(pool, (1.0, 0.0, 1.0))
    (single,) = open_group(pool, open_run(pool, "old", "collect", {}).id, TASK, 1)
    rolled(pool, single, 1.0, turns=1)
    dates = {id: attempt.opened_at for id in (solved, other) if (attempt := by_id(pool, id))}
    assert successes(pool, "old", "t", "command") == [RecordedSuccess(id, 3, dates[id]) for id in (solved, other)]
    assert successes(pool, "old", "t", "codex") == successes(pool, "old", "u", None) == []
    with pool.write() as connection:
        connection.execute(update(completions).where(completions.c.ordinal == 1).values(label="side"))
        connection.execute(update(attempts).where(attempts.c.id == other).values(augmentation=["shell=zsh"]))
    assert [(one.attempt_id, one.turns) for one in successes(pool, "old", "t", None)] == [(solved, 2)]
    assert solved_tasks(pool, "old") == {"t"} and solved_tasks(pool, "new") == set()
    with pool.write() as connection:
        connection.execute(update(groups).values(dropped_at=1.0))
    assert successes(pool, "old", "t", None) == [] and solved_tasks(pool, "old") == set()


def test_a_group_keeps_what_its_attempts_begin_with(pool: Pool) -> None:
    start, run_id = Start(7, 2, 12.5), open_run(pool, "new", "train", {}).id
    opened = open_group(pool, run_id, TASK, 2, GroupOptions(start=start))
    open_group(pool, run_id, TASK, 1)
    assert [one.start for one in opened] == [start] * 2
    assert [one.start for one in open_rollouts(pool, run_id)] == [start, start, None]
    attempt, key = open_attempt(pool, opened[0].rollout_id, "command")
    again = by_key(pool, key)
    assert again is not None and attempt.start == again.start == start and again.dated_at == 12.5


def test_outcomes_are_told_by_anchor_and_in_their_order(pool: Pool) -> None:
    run_id = open_run(pool, "new", "train", {}).id
    for turns, rewards in ((2, (1.0, 0.0)), (1, (1.0, None)), (2, (0.5, 1.0))):
        members = open_group(pool, run_id, TASK, 2, GroupOptions(start=Start(7, turns, 0.0)))
        for one, reward in zip(members, rewards, strict=True):
            rolled(pool, one, reward, failure=None if reward is not None else "replay_differed")
    assert outcomes(pool, run_id, [7, 8]) == {7: {2: [True, False, False, True], 1: [True]}}


def test_an_attempt_has_left_the_recorded_one_when_a_request_differed_or_turns_are_missing(pool: Pool) -> None:
    (source,) = recorded_run(pool)
    run_id = open_run(pool, "new", "train", {}).id
    start = Start(source, 2, 0.0)
    (rollout,) = open_group(pool, run_id, TASK, 1, GroupOptions(start=start))
    attempt, _ = open_attempt(pool, rollout.rollout_id, "command")
    assert left_replay(pool, attempt.id, start) == f"the agent ended after 0 of the 2 turns of attempt {source}"
    ids = record(pool, [replay(attempt.id, 1), replay(attempt.id, 1), new_completion(attempt.id)])
    assert replayed(pool, attempt.id).completions == {ids[0]: 1, ids[1]: 1}
    assert left_replay(pool, attempt.id, start) == f"the agent ended after 1 of the 2 turns of attempt {source}"
    record(pool, [replay(attempt.id, 2)])
    assert left_replay(pool, attempt.id, start) is None
    for how in ("first", "second"):
        note_differed(pool, attempt.id, how)
    assert left_replay(pool, attempt.id, start) == "first"
    assert verify(pool).damages == []
    text = "\n".join(show(pool, attempt.id))
    assert f"it begins with 2 turns of attempt {source}\nit left the recorded attempt: first" in text
    assert "given 2" in text and "untrainable (replayed: 1)" in text


def test_replayed_tokens_are_told_beside_the_run_s_own(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    """Two members replay 2 answers of 2 tokens and sample 2; the third one has left the recorded attempt."""
    (source,) = recorded_run(pool)
    run_id = open_run(pool, "new", "train", {}).id
    publish(pool, run_id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    members = open_group(pool, run_id, TASK, 3, GroupOptions(start=Start(source, 2, 0.0)))
    running, _ = open_attempt(pool, members[0].rollout_id, "command")
    record(pool, [replay(running.id, 1)])
    assert (account(pool, run_id).sampled, account(pool, run_id).replayed.tokens) == (0, 2)
    record(pool, [replay(running.id, 2), *[new_completion(running.id)] * 2])
    close_attempt(pool, running.id, Ending())
    finish_rollout(pool, members[0].rollout_id, Outcome(attempt_id=running.id, reward=1.0))
    rolled(pool, members[1], 0.0, replays=(1, 2))
    rolled(pool, members[2], None, turns=1, replays=(1,), failure="replay_differed")
    now = account(pool, run_id)
    assert (now.sampled, now.unaccounted, now.waiting["queued"].tokens) == (10, 0, 10)
    assert (now.replayed.groups, now.replayed.rollouts, now.replayed.tokens) == (1, 3, 10)
    leased = lease(pool, run_id, 1, RULE)
    assert leased is not None
    batch = assemble(leased.groups, StepOptions(credit=Credit()))
    assert batch.tokens == 8 and dict(batch.excluded) == {Untrained(UntrainedReason.REPLAY_DIFFERED): 2}
    fates = [fate.to_pool() for fate in batch.fates]
    assert left_out(pool, run_id, fates)["left_out_tokens"] == {"replay_differed": 2}
    publish_next(pool, run_id, Published(step=1, checkpoint="c", hf_dir="h", metrics={}, fates=fates))
    now = account(pool, run_id)
    assert (now.trained.tokens, now.sampled, now.unaccounted) == (8, 10, 0)
    assert {name: tally.tokens for name, tally in now.left_out.items()} == {"replay_differed": 2}
    line = next(line.split() for line in account_lines(now) if line.startswith("beside these, replayed"))
    assert line[3:6] == ["1", "3", "10"]
    assert main(["pool", "account", pool.url, "new"]) == 0
    assert "beside these, replayed" in capsys.readouterr().out


def test_the_reason_of_a_rollout_that_left_the_recorded_one() -> None:
    around = Surroundings(
        retried=False, without_reward=True, failure="replay_differed", hacked=None, set_aside=None, group=None
    )
    assert why_untrained(None, "main", around) == Untrained(UntrainedReason.REPLAY_DIFFERED)
    assert why_untrained(as_replayed(3), "main", around) == Untrained(UntrainedReason.REPLAYED, "3")
