"""Returns, baselines, shaping and normalisation against worked numbers (vectors.json)."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.credit import (
    chunk_returns,
    leave_one_out,
    overlong,
    reward_to_go,
    segment_returns,
    speed,
    turn_aligned,
)
from trainer.normalise import token_scales

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
    for found, expected in ((on_first, given["on_G1"]), (aligned, given["aligned"])):
        assert [value for turns in found for value in turns] == pytest.approx([v for turns in expected for v in turns])


def test_one_valid_rollout_has_no_others() -> None:
    assert leave_one_out([[1.0]]) is None and turn_aligned([[1.0, 2.0]]) is None


def test_chunks_and_segments() -> None:
    given = VECTORS["ipa"]
    assert chunk_returns(1.0, 3, given["gamma"]) == pytest.approx(given["G"])
    mask, rewards = [0, 1, 1, 0, 0, 1, 1, 1, 0, 1], [0.0] * 10
    rewards[7], rewards[9] = 0.5, 1.0
    assert segment_returns(mask, rewards, 0.9) == pytest.approx([0, 1.26, 1.26, 0, 0, 1.4, 1.4, 1.4, 0, 1])


def test_speed_against_a_baseline() -> None:
    assert [speed(t, 300) for t in (100, 200, 400, 800)] == pytest.approx([1, 0.584963, -0.415037, -1], abs=1e-6)


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
