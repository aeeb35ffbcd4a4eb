"""Group-relative advantages against worked numbers."""

import pytest

from trainer.advantages import group_relative, shuffled


def test_unbiased_standard_deviation() -> None:
    found = group_relative([1, 0, 0, 1, 1, 0, 0, 0])
    assert found is not None
    assert found[:2] == pytest.approx([1.207612396, -0.724567437], rel=1e-5)


def test_statistics_are_over_members_with_a_verdict() -> None:
    found = group_relative([1, None, 0, None, 0, 1, 1, None])
    assert found is not None and found[1] is None
    assert sum(value for value in found if value is not None) == pytest.approx(0)
    assert found == group_relative([1, None, 0, None, 0, 1, 1, None])


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [0.5, None], [None, None], []])
def test_a_group_without_differences_teaches_nothing(rewards: list[float | None]) -> None:
    assert group_relative(rewards) is None


def test_shuffling_keeps_the_rewards_and_the_missing_ones() -> None:
    rewards = [1.0, 0.0, None, 0.5, 0.25, 0.75]
    dealt = [shuffled(rewards, seed) for seed in range(20)]
    assert all(sorted(x for x in found if x is not None) == [0.0, 0.25, 0.5, 0.75, 1.0] for found in dealt)
    assert all(found[2] is None for found in dealt)
    assert len({tuple(found) for found in dealt}) > 10 and shuffled(rewards, 3) == dealt[3]
