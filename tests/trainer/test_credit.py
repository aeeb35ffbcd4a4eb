"""Returns, baselines, shaping and normalisation against worked numbers (vectors.json)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.pool.behaviour.process import within
from proxy.pool.completions.records import Completion
from tests.trainer.make import chain
from trainer.credit.critical_path import critical_path
from trainer.credit.returns import leave_one_out, overlong, places, reward_to_go, speed, speeds, turn_aligned
from trainer.credit.token_weights import token_scales

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())


def test_reward_to_go() -> None:
    given = VECTORS["reward_to_go"]
    assert reward_to_go(given["r"]) == pytest.approx(given["g1"])
    assert reward_to_go(given["r"], 0.9) == pytest.approx(given["g.9"])


def test_an_outcome_alone_is_every_turns_return() -> None:
    assert reward_to_go([0, 0, 0, 1.0]) == [1, 1, 1, 1]


def test_baselines_of_the_others() -> None:
    given = VECTORS["loo"]
    on_first, aligned = leave_one_out(given["G"]), turn_aligned(given["G"])
    assert on_first is not None and aligned is not None
    for computed, expected in ((on_first, given["on_G1"]), (aligned, given["aligned"])):
        assert [value for turns in computed for value in turns] == pytest.approx(
            [v for turns in expected for v in turns]
        )


def test_one_valid_rollout_has_no_others() -> None:
    assert leave_one_out([[1.0]]) is None and turn_aligned([[1.0, 2.0]]) is None


def test_chunk_returns_are_reward_to_go_of_an_outcome() -> None:
    given = VECTORS["ipa"]
    assert reward_to_go([0, 0, 1.0], given["gamma"]) == pytest.approx(given["G"])


def test_a_sub_agent_has_the_discount_of_the_turn_at_which_its_parent_goes_on() -> None:
    branches = [False, True, True, False, False]  # the first turn starts it, the fourth has its result
    assert places(branches) == [0, 1, 1, 1, 2]
    assert reward_to_go([0, 0, 0, 0, 1.0], 0.5, places(branches)) == [0.25, 0.5, 0.5, 0.5, 1.0]


def test_process_rewards_are_scaled_down_to_their_bound() -> None:
    assert within([0.1, -0.05], 0.2) == [0.1, -0.05]
    assert within([0.3, -0.1], 0.2) == pytest.approx([0.15, -0.05])


def test_speed_against_a_baseline() -> None:
    assert [speed(t, 300) for t in (100, 200, 400, 800)] == pytest.approx([1, 0.584963, -0.415037, -1], abs=1e-6)


def test_speed_is_of_successes_against_the_others() -> None:
    assert speeds([100, 200, 400, 10], [True, True, True, False]) == pytest.approx([1, 0.321928, -1, 0], abs=1e-6)
    assert speeds([100, 200], [True, False]) == [0, 0]


def timed(spans: list[tuple[float, float]], **more: dict[int, str]) -> list[Completion]:
    """Calls of 10 tokens with these times of start and end; `more`: further fields, by the number of the call."""
    calls = chain([([1], [2] * 10) for _ in spans])
    for number, (start, end) in enumerate(spans):
        own: dict[str, Any] = {name: values[number] for name, values in more.items() if number in values}
        calls[number] = replace(calls[number], started_at=start, finished_at=end, **own)
    return calls


def test_the_critical_path_is_tokens_at_a_reference_rate_and_tools() -> None:
    assert critical_path(timed([(0, 100), (103, 104), (106, 900)]), 10) == pytest.approx(3 * 1 + 3 + 2)
    slow_batch = critical_path(timed([(0, 1), (4, 5), (7, 8)]), 10)
    assert slow_batch == critical_path(timed([(0, 100), (103, 104), (106, 900)]), 10)


def test_sub_agents_side_by_side_count_once() -> None:
    one_after_the_other = [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    side_by_side = [(0.0, 1.0), (1.0, 2.0), (1.0, 2.0), (2.0, 3.0)]
    assert critical_path(timed(one_after_the_other), 10) == 4 and critical_path(timed(side_by_side), 10) == 3


@pytest.mark.parametrize(("quick", "slow"), [(0.5, 30.0), (30.0, 0.5)])
def test_a_parent_goes_on_from_the_longest_of_its_sub_agents_whichever_ends_last(quick: float, slow: float) -> None:
    """One has two calls with tools of 3 s between them, the other a single call; the engine takes any time for each."""
    spans = [(0.0, 1.0), (1.0, 1 + quick), (1.0, 1 + slow), (4 + quick, 4 + 2 * quick)]
    end = max(span[1] for span in spans)
    calls = timed(
        [*spans, (end + 2, end + 3)], label={0: "main", 1: "subagent", 2: "subagent", 3: "subagent", 4: "main"}
    )
    calls[3] = replace(calls[3], follows=calls[1].id)
    assert critical_path(calls, 10) == 1 + (1 + 3 + 1) + 2 + 1


@pytest.mark.parametrize("seconds", [1, 61])
def test_a_side_call_leaves_the_time_of_a_rollout(seconds: float) -> None:
    """Alone between two turns, together with tools of 2 s, and beside a turn that it outlasts."""
    end = 3 + seconds
    alone = timed([(0, 1), (1, end), (end, end + 1)], label={1: "side"})
    assert critical_path(alone, 10) == 2
    with_tools = timed([(0, 1), (2, end), (end + 1, end + 2)], label={1: "side"})
    assert critical_path(with_tools, 10) == 2 + 1 + 1
    beside = timed([(0, end), (0, end + 5), (end + 7, end + 8)], label={1: "side"})
    assert critical_path(beside, 10) == 2 + 2


@pytest.mark.parametrize("seconds", [1, 61])
def test_waiting_for_the_engine_leaves_the_time_of_a_rollout(seconds: float) -> None:
    """A call that broke off counts neither with its tokens nor with the pause before the next one, recorded or not."""
    end = 3 + seconds
    broken = timed([(0, 1), (2, end), (end + 4, end + 5)], finish_reason={1: "error"})
    assert critical_path(broken, 10) == 2 + 1
    whole = timed([(0, 1), (end + 4, end + 5)])
    assert critical_path(whole, 10, [(2, 2.5), (3, end)]) == 2 + 1


@pytest.mark.parametrize(
    ("length", "expected"), [(16384, 0), (16385, -0.000244), (18432, -0.5), (20480, -1), (20481, -1)]
)
def test_overlong(length: int, expected: float) -> None:
    assert overlong(length, 20480, 4096) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("norm", "constant", "rollouts", "name"),
    [
        ("token", 0.0, (0, 1, 2), "token_mean"),
        ("rollout", 0.0, (0, 1, 2), "seq_mean_token_mean"),
        ("constant", 4.0, (0, 1, 2), "dr_grpo_L4"),
        ("constant", 1.0, (0, 1, 2), "seq_mean_token_sum"),
        ("rollout", 0.0, (0, 0, 1), "slime_per_rollout(0,1|2)"),
    ],
)
def test_reductions(norm: Any, constant: float, rollouts: tuple[int, ...], name: str) -> None:
    given = VECTORS["reductions"]
    counts = [sum(mask) for mask in given["mask"]]
    scales = token_scales(counts, rollouts, norm, constant)
    total = sum(
        scale * loss * mask
        for scale, losses, masks in zip(scales, given["loss"], given["mask"], strict=True)
        for loss, mask in zip(losses, masks, strict=True)
    )
    assert total == pytest.approx(given[name])


def test_the_mix_lies_between_its_parts() -> None:
    counts, rollouts = [2, 1, 2], [0, 1, 2]
    parts = [token_scales(counts, rollouts, norm) for norm in ("token", "rollout")]
    mixed = token_scales(counts, rollouts, "mixed", 0.25)
    assert mixed == pytest.approx([0.25 * a + 0.75 * b for a, b in zip(*parts, strict=True)])


def test_nothing_trained_divides_by_nothing() -> None:
    assert token_scales([0, 0], [0, 1], "token") == [1, 1]
    assert token_scales([0, 3], [0, 1], "rollout")[1] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("norm", "constant"), [("token", 0.0), ("rollout", 0.0), ("constant", 4.0), ("mixed", 0.3)])
def test_a_weight_counts_as_that_many_copies(norm: Any, constant: float) -> None:
    repeated = token_scales([2, 1, 2, 1, 3], [0, 0, 1, 1, 2], norm, constant)
    scales = token_scales([2, 1, 3], [0, 0, 1], norm, constant, weights=[2.0, 2.0, 1.0])
    assert scales == pytest.approx([2 * repeated[0], 2 * repeated[1], repeated[4]])
