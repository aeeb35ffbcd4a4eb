"""Group-relative advantages against worked numbers."""

import pytest

from trainer.config.estimators import Estimator, Negatives
from trainer.credit.advantages import group_relative, padding_weight, shuffled


def test_unbiased_standard_deviation() -> None:
    scores = group_relative([1, 0, 0, 1, 1, 0, 0, 0])
    assert scores is not None
    assert scores[:2] == pytest.approx([1.207612396, -0.724567437], rel=1e-5)


def test_statistics_are_over_members_with_a_verdict() -> None:
    scores = group_relative([1, None, 0, None, 0, 1, 1, None])
    assert scores is not None and scores[1] is None
    assert sum(value for value in scores if value is not None) == pytest.approx(0)
    assert scores == group_relative([1, None, 0, None, 0, 1, 1, None])


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [0.3, 0.1 + 0.2], [0.5, None], [None, None], []])
def test_a_group_without_differences_teaches_nothing(rewards: list[float | None]) -> None:
    assert group_relative(rewards) is None


def test_shuffling_keeps_the_rewards_and_the_missing_ones() -> None:
    rewards = [1.0, 0.0, None, 0.5, 0.25, 0.75]
    dealt = [shuffled(rewards, seed) for seed in range(20)]
    assert all(sorted(x for x in rewards_ if x is not None) == [0.0, 0.25, 0.5, 0.75, 1.0] for rewards_ in dealt)
    assert all(rewards_[2] is None for rewards_ in dealt)
    assert len({tuple(rewards_) for rewards_ in dealt}) > 10 and shuffled(rewards, 3) == dealt[3]


@pytest.mark.parametrize(
    ("estimator", "up", "down"),
    [
        ("grpo", 1.207612396, -0.724567437),
        ("dr_grpo", 0.625, -0.375),
        ("rloo", 0.714285714, -0.428571429),
    ],
)
def test_estimators(estimator: Estimator, up: float, down: float) -> None:
    scores = group_relative([1, 0, 0, 1, 1, 0, 0, 0], estimator)
    assert scores is not None and scores[:2] == pytest.approx([up, down], rel=1e-5)


def test_a_group_with_failed_members_keeps_its_weight() -> None:
    scores = group_relative([1, 0, 0, 1, 1, None, None, None], "dr_grpo")
    weight = padding_weight(valid=5, size=8)
    assert scores is not None and weight == 1.6
    valid = [value * weight for value in scores if value is not None]
    assert valid == pytest.approx([0.64, -0.96, -0.96, 0.64, 0.64]) and sum(valid) == pytest.approx(0)


@pytest.mark.parametrize(
    ("size", "valid", "kept"), [(8, 4, False), (8, 5, True), (1, 1, True), (7, 4, True), (7, 3, False)]
)
def test_a_group_needs_more_than_half_of_its_members(size: int, valid: int, kept: bool) -> None:
    assert (padding_weight(valid, size) is not None) == kept


def test_negatives_come_late_and_not_when_they_ramble() -> None:
    rule = Negatives(positive_only_until=10, weight=0.5, longest=100)
    assert [rule.factor(-1.0, 50, step) for step in (1, 10, 11, 99)] == [0, 0, 0.5, 0.5]
    assert rule.factor(-1.0, 101, 99) == 0 and rule.factor(0.5, 1000, 1) == 1
