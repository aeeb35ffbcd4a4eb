"""The credit of each turn, from leased groups to the advantage of each trained token."""

from array import array
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from proxy.pool.behaviour.process import figures
from proxy.pool.completions.observed import UNKNOWN_TOOL, Observed, ToldCall, ToolResult
from proxy.pool.completions.records import Completion, NewCompletion
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.starts import as_replayed
from proxy.pool.settings_file import checked
from proxy.pool.training.unused_groups import since_last_step
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout
from proxy.pool.untrained import Untrained, UntrainedReason, to_metrics
from tests.pool.make import record
from tests.trainer.make import chain, make_config
from trainer.config import Credit, Loss
from trainer.config.credit import ProcessRewards
from trainer.config.estimators import Norm
from trainer.config.step import StepOptions, step_options
from trainer.credit.scales import added, deviations
from trainer.data.assemble import TrainingBatch, assemble
from trainer.data.tree import build, order
from trainer.megatron.parallel import Ranks
from trainer.report.describe import survival
from trainer.run_state import RunState

FAILED = Untrained(UntrainedReason.ROLLOUT_FAILED, "verifier")
HISTORY = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7, 8, 9]), ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], [10])]
TURNS = (2, 3, 1)
"""Sampled tokens of its turns."""


def member(number: int, reward: float | None, turns: int = 3, **more: Any) -> LeasedRollout:
    return replace(
        LeasedRollout(number, number, reward, FAILED if reward is None else None, chain(HISTORY[:turns])), **more
    )


def group(members: Sequence[LeasedRollout], domain: str = "agent", size: int | None = None) -> LeasedGroup:
    return LeasedGroup(1, 0, {"domain": domain}, 0, list(members), size)


def rewarded(rewards: Sequence[float | None], **credit: Any) -> TrainingBatch:
    members = [member(number, reward) for number, reward in enumerate(rewards)]
    return assemble([group(members)], StepOptions(credit=Credit(**credit)))


def by_turn(batch: TrainingBatch) -> list[list[float]]:
    """The advantage of each turn by row; all tokens of a turn must have the same."""
    by_rollout = []
    for row in batch.rows:
        turns = [row.advantage[row.trained & (row.segment == turn)] for turn in range(int(row.segment.max()) + 1)]
        assert all(len(set(values.tolist())) == 1 for values in turns)
        by_rollout.append([float(values[0]) for values in turns])
    return by_rollout


def test_an_outcome_alone_credits_every_turn_alike() -> None:
    plain, turns = rewarded([1.0, 0.0, 0.0, 1.0]), rewarded([1.0, 0.0, 0.0, 1.0], returns="turns")
    assert all(len(set(values)) == 1 for values in by_turn(plain))
    assert by_turn(turns) == [pytest.approx([value] * 3) for value in (2 / 3, -2 / 3, -2 / 3, 2 / 3)]


def test_process_rewards_go_to_the_turns_up_to_theirs() -> None:
    """The worked numbers of reward-to-go with both baselines, over three turns."""
    parts = {"turn:0": -0.1, "turn:1": 0.05}
    members = [member(0, 1.0, parts=parts), member(1, 0.0), member(2, 0.0, turns=2)]
    choice = StepOptions(credit=Credit(returns="turns"))
    firsts = [0.95, 0.0, 0.0]
    assert by_turn(assemble([group(members)], choice)) == [
        pytest.approx([0.95, 1.05, 1.0]),
        pytest.approx([-(firsts[0] + firsts[2]) / 2] * 3),
        pytest.approx([-(firsts[0] + firsts[1]) / 2] * 2),
    ]
    aligned = assemble([group(members)], StepOptions(credit=Credit(returns="turns", baseline="aligned")))
    assert by_turn(aligned)[1] == pytest.approx([-0.475, -0.525, -0.5])


def test_returns_of_segments_as_roll_has_them() -> None:
    """ROLL's `compute_agentic_reinforce_return`, worked: runs of 2, 3 and 1 tokens, rewards 0.5 and 1, gamma 0.9."""

    class Generous(Credit, frozen=True, kw_only=True):
        PROCESS_BOUND = 0.5
        SUCCESS = 2.0

    credit = Generous(returns="turns", baseline="none", gamma=0.9)
    members = [member(0, 1.0, parts={"turn:1": 0.5}), member(1, 0.0)]
    row = assemble([group(members)], StepOptions(credit=credit)).rows[0]
    assert row.advantage[row.trained].tolist() == pytest.approx([1.26] * 2 + [1.4] * 3 + [1.0])


def test_the_loss_of_chunks_has_discounted_returns() -> None:
    members = [member(0, 1.0), member(1, -1.0)]
    choice = StepOptions(loss=Loss(kind="ipa"), credit=Credit(returns="turns", baseline="none", gamma=0.9))
    assert by_turn(assemble([group(members)], choice)) == [
        pytest.approx([0.81, 0.9, 1]),
        pytest.approx([-0.81, -0.9, -1]),
    ]
    relative = by_turn(assemble([group(members)], StepOptions(loss=Loss(kind="ipa"), credit=Credit(gamma=0.9))))
    assert relative[0] == pytest.approx([0.81 * relative[0][2], 0.9 * relative[0][2], relative[0][2]])


def replayed(one: LeasedRollout, turns: int) -> LeasedRollout:
    """The rollout as if it began with so many turns of a recorded one."""
    given = [
        replace(
            item,
            given=((0, len(item.sampled)),),
            logprobs=array("f"),
            versions=(),
            untrainable=as_replayed(99),
        )
        for item in one.completions[:turns]
    ]
    return replace(one, completions=[*given, *one.completions[turns:]])


def test_a_chunk_behind_a_recorded_beginning_has_the_return_of_the_whole_rollout() -> None:
    """IPA's returns of three chunks are 0.81, 0.9, 1 (gamma 0.9); the first one is replayed, and not trained."""
    members = [replayed(member(0, 1.0), 1), replayed(member(1, -1.0), 1)]
    credit = Credit(returns="turns", baseline="none", gamma=0.9)
    batch = assemble([group(members)], StepOptions(loss=Loss(kind="ipa"), credit=credit))
    assert by_turn(batch) == [pytest.approx([0.9, 1]), pytest.approx([-0.9, -1])]
    assert [row.places.tolist() for row in batch.rows] == [[6, 7, 8, 10]] * 2
    assert batch.tokens == 8 and not batch.excluded
    told = survival([item for one in members for item in one.completions], batch)
    assert (told["sampled_tokens"], told["replayed_tokens"], told["unaccounted_tokens"]) == (8, 4, 0)


def test_the_baseline_is_the_return_of_the_first_turn_that_was_sampled() -> None:
    """The anchor is one turn in: returns of 0.9 and 1; 0; 1. Each is compared with the others' first ones."""
    members = [
        replayed(member(0, 1.0), 1),
        replayed(member(1, 0.0, turns=2), 1),
        replayed(member(2, 1.0, turns=2), 1),
    ]
    for baseline in ("first", "aligned"):
        credit = Credit(returns="turns", gamma=0.9, baseline=baseline)
        advantages = by_turn(assemble([group(members)], StepOptions(credit=credit)))
        assert advantages == [pytest.approx([0.4, 0.5]), pytest.approx([-0.95]), pytest.approx([0.55])]


def test_what_was_replayed_costs_and_earns_nothing() -> None:
    parts = {"turn:0": -1.0, "turn:2": -0.1}
    members = [replayed(member(0, 1.0, parts=parts), 1), replayed(member(1, 0.0), 1)]
    batch = assemble([group(members)], StepOptions(credit=Credit(returns="turns")))
    assert by_turn(batch) == [pytest.approx([0.9, 0.9]), pytest.approx([-0.9] * 2)]
    assert batch.unplaced_rewards == 1
    cut = replayed(member(2, 1.0), 3)
    ended = replace(cut.completions[2], finish_reason="length")
    whole = replace(cut, completions=[*cut.completions[:2], ended])  # it ended without a turn of its own
    batch = assemble([group([whole, replayed(member(1, 0.0), 1)])], StepOptions(credit=Credit(mask=("truncated",))))
    assert batch.tokens == 4 and not batch.masked


def test_equal_rewards_teach_where_they_are_compared_with_nothing() -> None:
    credit = Credit(returns="turns", baseline="none", gamma=0.5)
    for rewards in ([1.0, 1.0], [-1.0, -1.0]):
        batch = rewarded(rewards, returns="turns", baseline="none", gamma=0.5)
        assert by_turn(batch) == [pytest.approx([reward / 4, reward / 2, reward]) for reward in rewards]
        assert batch.dropped_groups == 0 and rewarded(rewards, returns="turns").dropped_groups == 1
    assert rewarded([0.0, 0.0], returns="turns", baseline="none").dropped_groups == 1  # nothing was earned
    costs = [member(i, 0.0, parts={"turn:1": -0.1}) for i in range(2)]
    assert by_turn(assemble([group(costs)], StepOptions(credit=credit))) == [pytest.approx([-0.05, -0.1, 0.0])] * 2


def test_process_rewards_are_bounded_and_those_of_no_turn_are_to_metrics() -> None:
    members = [member(0, 1.0, parts={"turn:0": 7.0, "turn:1": 1.0, "turn:9": 1.0, "style": 0.3}), member(1, 0.0)]
    batch = assemble([group(members)], StepOptions(credit=Credit(returns="turns")))
    assert by_turn(batch)[0] == pytest.approx([1.2, 1.1, 1.0]) and batch.unplaced_rewards == 1
    assert assemble([group(members)], StepOptions()).unplaced_rewards == 0


def at_work(failing: Sequence[int], reasoning: str = "", turns: int = 3) -> list[Completion]:
    """A chain of completions whose turns each call a tool. The calls of the `failing` turns fail."""
    calls = chain(HISTORY[:turns])
    for i, item in enumerate(calls):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "bash", "arguments": f'{{"command": "a{i}"}}'}}
        reply = {"role": "assistant", "content": None, "reasoning_content": reasoning, "tool_calls": [call]}
        result = ToolResult(f"c{i - 1}", "", "no such command", "", 15, i - 1 in failing)
        foreign = (("han", reasoning),) if reasoning else ()
        shown = Observed(results=(result,) if i else (), foreign=foreign)
        calls[i] = replace(item, follows=item.prefix_of, finish_reason="tool_calls", reply=reply, observed=shown)
    return calls


def test_from_a_part_of_the_reward_or_an_event_to_the_advantage_of_each_token() -> None:
    """Verdicts are equal: only what the first turns did differs. A worse second turn is the verifier's `turn:1`."""
    members = [
        member(0, 1.0, completions=at_work([0], reasoning="我先看一下这个文件的内容")),
        member(1, 1.0, completions=at_work([])),
        member(2, 1.0, completions=at_work([]), parts={"turn:1": -0.12}),
    ]
    process = ProcessRewards(tool_errors=0.06, language_mixing=0.0)
    batch = assemble([group(members)], StepOptions(credit=Credit(returns="turns", process=process)))
    returns = [[0.94, 1.0, 1.0], [1.0, 1.0, 1.0], [0.88, 0.88, 1.0]]
    baselines = [0.94, 0.91, 0.97]
    assert by_turn(batch) == [
        pytest.approx([value - baseline for value in turns]) for turns, baseline in zip(returns, baselines, strict=True)
    ]
    assert batch.dropped_groups == 0 and [int(row.trained.sum()) for row in batch.rows] == [sum(TURNS)] * 3
    mixed = ProcessRewards(tool_errors=0.06, language_mixing=0.01)  # all turns of the first one think in Chinese
    penalised = assemble([group(members)], StepOptions(credit=Credit(returns="turns", process=mixed)))
    assert by_turn(penalised)[0] == pytest.approx([0.91 - 0.94, 0.98 - 0.94, 0.99 - 0.94])
    many = ProcessRewards(tool_errors=5.0)  # bounded by turn and by rollout
    bounded = by_turn(assemble([group(members)], StepOptions(credit=Credit(returns="turns", process=many))))
    assert bounded[0] == pytest.approx([0.8 - 0.94, 1 - 0.94, 1 - 0.94])


def test_a_turn_in_a_full_context_costs_unless_it_manages_it() -> None:
    """The prompts of the three turns have 3, 6 and 10 tokens. One model knows `fold` as `fork`."""

    def labelled(label: str, *tools: str) -> list[Completion]:
        calls = [{"function": {"name": tool, "arguments": '{"prompt": "p"}'}} for tool in tools]
        first, second, third = (replace(item, label="main") for item in at_work([]))
        return [first, replace(second, label=label, reply={**second.reply, "tool_calls": calls}), third]

    process = ProcessRewards(full_context=0.05, full_context_tokens=5)
    credit = Credit(returns="turns", process=process)
    rollouts = [labelled("main", "shell"), labelled("main", "shell", "fold"), labelled("compaction")]
    varied = labelled("main", "fork")
    varied[1] = replace(varied[1], observed=Observed(told=(ToldCall("fold"),)))
    members = [member(number, 1.0, completions=chain) for number, chain in enumerate([*rollouts, varied])]
    members.append(member(4, 0.0, turns=1))  # or nothing but their length would differ
    own = [[0.9, 0.9, 0.95], [0.95, 0.95, 0.95], [0.95, 0.95, 0.95], [0.95, 0.95, 0.95], [0.0]]
    baselines = [2.85 / 4, 2.8 / 4, 2.8 / 4, 2.8 / 4, 3.75 / 4]
    for got, returns, baseline in zip(
        by_turn(assemble([group(members)], StepOptions(credit=credit))), own, baselines, strict=True
    ):
        assert got == pytest.approx([value - baseline for value in returns])


def test_equal_verdicts_are_trained_for_process_rewards_alone() -> None:
    """Neither speed nor length makes a group worth training, nor does what the step does not count."""
    slow = [replace(item, started_at=i * 100.0, finished_at=i * 100 + 50.0) for i, item in enumerate(at_work([]))]
    process = ProcessRewards(tool_errors=0.1)
    plain = [member(0, 1.0, completions=at_work([])), member(1, 1.0, completions=slow), member(2, 1.0, turns=1)]
    side = [replace(item, label="side") for item in at_work([0])]
    unlike = [[member(0, 1.0, completions=at_work([0])), *plain[1:]], [member(0, 1.0, completions=side), *plain[1:]]]
    credit = Credit(returns="turns", speed_weight=0.1, overlong_limit=3, process=process)
    for members, equal in ((plain, 1), (unlike[0], 0), (unlike[1], 1)):
        batch = assemble([group(members)], StepOptions(credit=credit))
        assert batch.dropped_groups == batch.equal_groups == equal
    for other in (Credit(), Credit(returns="turns"), Credit(returns="turns", process_weight=0.0)):
        assert assemble([group(unlike[0])], StepOptions(credit=other)).dropped_groups == 1
    alike = [member(number, 1.0, completions=at_work([0])) for number in range(2)]
    assert assemble([group(alike)], StepOptions(credit=credit)).dropped_groups == 1
    few = assemble([group([member(0, 1.0)], size=4)], StepOptions(credit=credit))
    assert (few.dropped_groups, few.equal_groups) == (1, 0)


@pytest.mark.parametrize(
    ("tool", "arguments", "fault", "result", "spared"),
    [
        ("compact", '{"notes": "a"}', "", "done", True),
        ("discard", '{"keep_last": 0}', "", "done", True),
        ("compact", '{"notes": "a"}', "", None, True),  # the next request shows notes in the place of all turns
        ("compact", '{"notes": "a"}', UNKNOWN_TOOL, None, False),
        ("compact", "{}", "the call lacks 'notes'", None, False),
        ("compact", '{"notes": " "}', "", "done", False),
        ("compact", "", "", "done", False),
        ("discard", '{"keep_last": -1}', "", "Error: keep_last must be 0 or more", False),
        ("shell", '{"command": "compact"}', "", "done", False),
    ],
)
def test_only_a_call_that_works_manages_a_context(
    tool: str, arguments: str, fault: str, result: str | None, spared: bool
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": tool, "arguments": arguments}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    first, second = chain(HISTORY[:2])
    shown = () if result is None else (ToolResult("c", "", result, "", len(result)),)
    first = replace(first, reply=reply, observed=Observed(faults=(fault,) if fault else ()))
    second = replace(second, follows=first.id, observed=Observed(results=shown))
    assert [turn.manages for turn in figures([first, second])] == [spared, False]


def test_the_length_of_prompts_makes_no_group_worth_training() -> None:
    """All verdicts are equal. Prompts of the second and third turn are long, and a shorter rollout has none."""
    process = ProcessRewards(full_context=0.05, full_context_tokens=5, tool_errors=0.1)

    def main(failing: Sequence[int] = (), turns: int = 3) -> list[Completion]:
        return [replace(item, label="main") for item in at_work(failing, turns=turns)]

    for baseline, reward in (("first", 1.0), ("none", 0.0)):
        credit = Credit(returns="turns", baseline=cast(Any, baseline), process=process)
        members = [member(0, reward, completions=main()), member(1, reward, completions=main(turns=1))]
        batch = assemble([group(members)], StepOptions(credit=credit))
        assert batch.equal_groups == 1 and batch.rows == []
        failing = member(0, reward, completions=main([0]))
        batch = assemble([group([failing, members[1]])], StepOptions(credit=credit))
        assert batch.equal_groups == 0 and by_turn(batch)[0][-1] < 0  # then it costs, too


def test_the_pool_keeps_for_a_step_what_the_step_trains(pool: Pool, ranks: Ranks, tmp_path: Path) -> None:
    """Of three groups with equal verdicts only the second has different process rewards; the first has equal ones."""
    batch = {"groups": 1, "max_staleness": 100, "patience_seconds": 60, "refill": True}
    config = make_config(tmp_path, batch=batch, credit={"returns": "turns", "process": {"tool_errors": 0.1}})
    with RunState(config, ranks) as run:
        run.publish(0, (tmp_path / "checkpoint", tmp_path / "weights"), {})
        for failing in (([0], [0]), ([], [0]), ([], [])):
            opened = open_group(pool, run.pool_run.id, {"id": "t", "instruction": "i", "domain": "agent"}, 2)
            for rollout, turns in zip(opened, failing, strict=True):
                attempt, _ = open_attempt(pool, rollout.rollout_id, "command")
                before = None
                for item in at_work(turns):
                    link = {"prefix_of": item.prefix_of and before, "follows": before, "attempt_id": attempt.id}
                    new = {each.name: getattr(item, each.name) for each in fields(NewCompletion)} | link
                    [before] = record(pool, [NewCompletion(**new)])
                close_attempt(pool, attempt.id, Ending())
                finish_rollout(pool, rollout.rollout_id, Outcome(attempt_id=attempt.id, reward=1.0))
        leased = run.wait_for_lease(1).groups
        assert [group.queue_index for group in leased] == [1]
        assert assemble(leased, step_options(config, 1)).dropped_groups == 0
        assert since_last_step(pool, run.pool_run.id) == {"equal_rewards": 1}


def test_side_calls_are_no_turns() -> None:
    labelled = [
        replace(item, label=label) for item, label in zip(chain(HISTORY), ("main", "side", "main"), strict=True)
    ]
    members = [replace(member(0, 1.0), completions=labelled), member(1, 0.0)]
    credit = Credit(returns="turns", baseline="none", gamma=0.5)
    assert by_turn(assemble([group(members)], StepOptions(credit=credit)))[0] == [0.5, 1.0]


def test_a_sub_agents_turns_have_the_discount_of_the_turn_that_follows() -> None:
    labels = ("main", "subagent", "subagent", "main")
    history = [*HISTORY, ([*range(1, 12), 9], [7])]
    calls = [replace(item, label=label) for item, label in zip(chain(history), labels, strict=True)]
    members = [replace(member(0, 1.0), completions=calls), member(1, 0.0)]
    credit = Credit(returns="turns", baseline="none", gamma=0.5)
    rows = assemble([group(members)], StepOptions(credit=credit)).rows
    advantages = [float(value) for row in rows[:-1] for value in row.advantage[row.trained]]
    assert sorted(set(advantages)) == [0.5, 1.0] and advantages.count(0.5) == len(calls[0].sampled)


def test_a_group_with_failed_members_weighs_as_a_whole_one() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, None, None, None]
    members = [member(number, reward) for number, reward in enumerate(rewards)]
    whole = [member(number, float(number % 2)) for number in range(8)]
    batch = assemble([group(members), group(whole)], StepOptions(loss=Loss(advantage="dr_grpo")))
    failed, other = batch.rows[0], batch.rows[5]
    assert failed.weight / other.weight == pytest.approx(1.6)
    assert sum(row.weight * row.advantage[row.trained].sum() for row in batch.rows[:5]) == pytest.approx(0, abs=1e-6)
    assert [float(row.advantage[3]) for row in batch.rows[:5]] == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])


def test_the_weights_are_those_of_repeated_rollouts() -> None:
    """Two of three members valid: the same as a group with each of them three times, beside a whole group twice."""
    short, long = member(0, 1.0, turns=1), member(1, 0.0)
    norms: tuple[Norm, ...] = ("token", "rollout")
    for norm in norms:
        choice = StepOptions(loss=Loss(norm=norm))
        weighed = assemble([group([short, long, member(2, None)]), group([short, long])], choice).rows
        repeated = assemble([group([short, long] * 3), group([short, long] * 2)], choice).rows
        share = [row.weight * row.trained.sum() for row in weighed]
        copies = [row.weight * row.trained.sum() for row in repeated]
        expected = [sum(copies[:6:2]), sum(copies[1:6:2]), sum(copies[6::2]), sum(copies[7::2])]
        assert np.array(share) / sum(share) == pytest.approx(np.array(expected) / sum(expected))


def test_a_group_without_a_majority_is_dropped() -> None:
    batch = assemble([group([member(0, 1.0), member(1, 0.0)], size=4)], StepOptions())
    assert batch.rows == [] and batch.dropped_groups == 1
    assert to_metrics(batch.excluded) == {"too_few_valid": 12}


@pytest.mark.parametrize(("steps", "expected"), [([], [1.1, 0.9, 0.0]), ([{"name": "a"}], [1.0, 1.0, 0.0])])
def test_speed_is_added_to_successes_except_in_tasks_with_steps(
    steps: list[dict[str, str]], expected: list[float]
) -> None:
    def at(seconds: float, lost: float = 0.0) -> dict[str, Any]:
        """Calls with tools of so many seconds between them; before the last one a side call or a failure of `lost`."""
        begins = [0.0, seconds, 2 * seconds + lost]
        calls = [replace(item, started_at=at, finished_at=at) for at, item in zip(begins, chain(HISTORY), strict=True)]
        return {"completions": calls}

    side = replace(chain(HISTORY)[0], id=9, label="side", started_at=60.0, finished_at=360.0)
    quick, slow = at(50, 300), at(100, 300)
    quick["completions"].append(side)
    members = [
        member(0, 1.0, **quick),
        member(1, 1.0, **slow, failed_calls=[[200.0, 210.0], [240.0, 450.0]]),
        member(2, 0.0, **at(1)),
    ]

    class AtOnce(Credit, frozen=True, kw_only=True):
        TOKENS_PER_SECOND = 1e9

    credit = AtOnce(returns="turns", baseline="none", process_weight=0.0, speed_weight=0.1)
    with_steps = replace(group(members), task={"domain": "agent", "steps": steps})
    firsts = [turns[0] for turns in by_turn(assemble([with_steps], StepOptions(credit=credit)))]
    assert firsts == pytest.approx(expected)


def test_a_success_that_is_too_long_earns_less() -> None:
    credit = Credit(returns="turns", baseline="none", process_weight=0.0, overlong_limit=8, overlong_margin=4)
    advantages = by_turn(rewarded_with(credit, [1.0, 0.0]))
    assert (
        advantages[0] == pytest.approx([0.5] * 3) and advantages[1] == [0.0] * 3
    )  # 6 of 8 tokens, half into the margin


def rewarded_with(credit: Credit, rewards: Sequence[float]) -> TrainingBatch:
    members = [member(number, reward) for number, reward in enumerate(rewards)]
    return assemble([group(members)], StepOptions(credit=credit))


@pytest.mark.parametrize("finish", ["length", "repetition"])
def test_stale_and_truncated_rollouts_stay_in_the_baseline_and_in_every_count(finish: str) -> None:
    cut = chain(HISTORY)
    cut[-1] = replace(cut[-1], finish_reason=finish)
    members = [member(0, 1.0), member(1, 0.0, staleness=3), member(2, 0.0, completions=cut), member(3, 0.0)]
    whole = by_turn(assemble([group(members)], StepOptions()))
    batch = assemble([group(members)], StepOptions(max_staleness=2, credit=Credit(mask=("truncated",))))
    assert by_turn(batch) == [whole[0], [0.0] * 3, [0.0] * 3, whole[3]]
    assert batch.tokens == 24 and to_metrics(batch.masked) == {"stale": 6, "truncated": 6}
    # no other term of the loss (KL, a penalty) teaches there either, and the denominator is that of all of them
    assert [row.weight for row in batch.rows] == [1.0, 0.0, 0.0, 1.0]
    members[3] = replace(members[3], failure="agent_budget")
    members[0] = replace(members[0], failure="agent_turns")
    for credit, masked in (
        (Credit(), {}),
        (Credit(mask=("budget", "turns")), {"budget": 6, "turns": 6}),
        (Credit(mask=("budget",)), {"budget": 6}),
        (Credit(mask=("turns",)), {"turns": 6}),
    ):
        batch = assemble([group(members)], StepOptions(credit=credit))
        pairs = (("turns", whole[0]), ("budget", whole[3]))
        of_turns, of_budget = ([0.0] * 3 if name in masked else values for name, values in pairs)
        assert by_turn(batch) == [of_turns, *whole[1:3], of_budget] and to_metrics(batch.masked) == masked


def test_returns_are_scaled_by_the_deviation_over_earlier_steps_of_their_domain() -> None:
    def step(scales: dict[str, Any] | None) -> TrainingBatch:
        code = [group([member(0, 8.0), member(1, 0.0)], "code") for _ in range(15)]
        groups = [*code, group([member(0, 8.0), member(1, 2.0)], "code"), group([member(0, 1.0), member(1, 0.0)], "qa")]
        credit = Credit(returns="turns", scale="domain", process_weight=0.0)
        return assemble(groups, StepOptions(credit=credit, scales=scales or {}))

    whole = [8.0, 0.0] * 15 + [8.0, 2.0]
    assert Credit(scale="domain", returns="turns").by_domain and not Credit(returns="turns").by_domain
    first = step(None)  # a step's own returns never scale it, and one step before it is no deviation either
    second = step(first.scales)
    for batch in (first, second):
        assert [turns[0] for turns in by_turn(batch)][-4:] == [6.0, -6.0, 1.0, -1.0]
    third = step(second.scales)
    again = np.average((np.array([whole, whole]) - np.mean(whole)) ** 2, weights=[[0.99] * 32, [1.0] * 32]) ** 0.5
    firsts = [turns[0] for turns in by_turn(third)][-4:]
    assert firsts == pytest.approx([6 / again, -6 / again, 1.0, -1.0])  # of the second domain too few groups were seen
    assert third.scales is not None and (third.scales["qa"]["groups"], third.scales["code"]["steps"]) == (3, 3)
    assert msgspec.json.decode(msgspec.json.encode(third.scales)) == third.scales
    assert step(second.scales).scales == third.scales  # a step that is repeated is the same
    assert by_turn(step(second.scales)) == by_turn(third)
    assert assemble([], StepOptions(credit=Credit())).scales is None


def test_running_deviations_are_those_of_all_returns_with_older_ones_weighing_less() -> None:
    steps = [[[1.0, 0.0], [3.0, 5.0]], [[2.0, 2.0]], [], [[-4.0, 0.5, 0.5]] * 40]
    state: dict[str, Any] = {}
    for groups in steps:
        state = added(state, {"agent": groups})
    seen = [
        (value, 0.99**age) for age, some in ((2, steps[0]), (1, steps[1]), (0, steps[3])) for g in some for value in g
    ]
    values, weights = np.array(seen).T
    mean = np.average(values, weights=weights)
    assert state["agent"]["mean"] == pytest.approx(mean)
    assert deviations(state) == {"agent": pytest.approx(np.average((values - mean) ** 2, weights=weights) ** 0.5)}
    assert deviations(added(added({}, {"agent": [[1.0, 1.0]] * 40}), {"agent": [[1.0]]})) == {}  # nothing differed


def test_negatives_are_weighed_turn_by_turn() -> None:
    members = [member(0, 1.0, parts={"turn:0": 1.0}), member(1, 0.9, parts={"turn:0": -1.0})]

    class Bounded(Credit, frozen=True, kw_only=True):
        PROCESS_BOUND = 0.3

    credit = Bounded(returns="turns")
    plain = by_turn(assemble([group(members)], StepOptions(credit=credit)))
    halved = by_turn(assemble([group(members)], StepOptions(credit=credit, loss=Loss(negative_weight=0.5))))
    assert plain[0] == pytest.approx([0.7, 0.4, 0.4]) and plain[1] == pytest.approx([-0.7, -0.4, -0.4])
    assert halved == [plain[0], pytest.approx([-0.35, -0.2, -0.2])]
    early = assemble([group(members)], StepOptions(credit=credit, loss=Loss(positive_only_until=1)))
    assert by_turn(early)[1] == [0.0] * 3 and to_metrics(early.masked) == {"negative_advantage": 6}


def test_branches_that_share_sampled_tokens_keep_an_advantage_each() -> None:
    """Two members that sampled the same first turn: one place in the tree, two advantages."""
    first, second = chain(HISTORY), chain([HISTORY[0], ([1, 2, 3, 4, 5, 8], [7])])
    members = [
        replace(member(0, 1.0), completions=first, parts={"turn:0": 0.1}),
        replace(member(1, 0.0), completions=second),
    ]
    rows = assemble([group(members)], StepOptions(credit=Credit(returns="turns"))).rows
    tree = build(rows)
    assert len(order(rows).rows) == 2 and len(tree.parents) < sum(len(row.places) for row in rows)
    scores = np.concatenate([row.advantage[row.places] for row in rows])
    shared = [
        scores[tree.edges == edge].tolist() for edge in range(len(tree.parents)) if (tree.edges == edge).sum() > 1
    ]
    assert shared == [pytest.approx([1.1, -1.1])] * 2


def test_a_rollout_without_a_turn_is_still_in_the_baseline() -> None:
    members = [replace(member(0, 1.0), completions=[]), member(1, 0.0), member(2, 0.0)]
    advantages = by_turn(assemble([group(members)], StepOptions(credit=Credit(returns="turns"))))
    assert advantages == [pytest.approx([-0.5] * 3)] * 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"gamma": 0.0}, "credit: gamma = 0.0: expected `float` > 0.0"),
        ({"speed_weight": -0.1}, "credit: speed_weight = -0.1: expected `float` >= 0.0"),
        (
            {"overlong_limit": 5, "overlong_margin": 5},
            "credit.overlong_limit = 5 is not above credit.overlong_margin = 5",
        ),
        ({"speed_weight": 1.0}, "so that a failure could outdo a success; lower it"),
        ({"process": {"tool_errors": 0.1}}, "credit.process makes rewards of single turns.*set credit.returns = turns"),
        ({"process": {"tool_error": 0.1}}, "credit.*unknown key.*keys there: tool_errors"),
        ({"process": {"full_context": 0.1}}, "credit.*full_context_tokens = 0 belong together; set both, or neither"),
        ({"returns": "turns", "speed_weight": 0.6}, "process rewards of up to 0.2 either way reach 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        checked(values, Credit, "credit")


def test_the_control_run_takes_nothing_but_the_shuffled_rewards() -> None:
    with pytest.raises(UserError, match="credit.shuffle_rewards shuffles the verifier's rewards"):
        Credit(returns="turns", shuffle_rewards=True)
    assert not Credit(returns="turns", process_weight=0.0, shuffle_rewards=True).shaped


def test_logprobs_that_are_missing_take_their_turn_out_and_leave_the_others_credit() -> None:
    calls = chain(HISTORY)
    calls[1] = replace(calls[1], logprobs=array("f"))
    members = [replace(member(0, 1.0), completions=calls), member(1, 0.0)]
    credit = Credit(returns="turns", baseline="none", gamma=0.5)
    batch = assemble([group(members)], StepOptions(credit=credit))
    assert by_turn(batch)[0] == [0.25, 1.0] and to_metrics(batch.excluded) == {"logprobs_missing": 3}
