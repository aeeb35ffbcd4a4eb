"""Advantages of rollouts relative to their group.

Statistics are over the members with a verdict, never over placeholders. Left out: critics; returns per turn
(trainer/credit/returns.py); which turn gets which credit (trainer/credit/assign.py).
"""

import random
from collections.abc import Sequence
from statistics import fmean, stdev

from proxy.pool.behaviour.process import equal_rewards
from proxy.pool.rollouts.failures import enough_valid
from trainer.config.estimators import Estimator


def group_relative(rewards: Sequence[float | None], estimator: Estimator = "grpo") -> list[float | None] | None:
    """One advantage per member; None for a member without a reward.

    grpo: (R - mean) / (std + 1e-6) (arXiv 2402.03300; equation 2 of MiniMax-M1, arXiv 2506.13585), with the unbiased
    std of slime, verl and TRL. dr_grpo: R - mean (arXiv 2503.20783). rloo: R - mean of the others. Returns None for the
    whole group when its rewards are equal or only one member has one: it teaches nothing.
    """
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2 or equal_rewards(valid):
        return None
    mean = fmean(valid)
    factors = {"grpo": 1 / (stdev(valid) + 1e-6), "dr_grpo": 1.0, "rloo": len(valid) / (len(valid) - 1)}
    return [None if reward is None else (reward - mean) * factors[estimator] for reward in rewards]


def padding_weight(valid: int, size: int) -> float | None:
    """The weight of each member of a group with failed members (GLM-5, arXiv 2602.15763), or None to drop the group.

    A group is dropped unless more than half of its `size` members are valid. GLM-5 repeats valid members to fill the
    group; here each one weighs size / valid instead, which keeps the group's weight and a sum of advantages of 0.
    """
    return size / valid if enough_valid(valid, size) else None


def shuffled(rewards: Sequence[float | None], seed: int) -> list[float | None]:
    """The same rewards, distributed at random among the members that have one: the control run."""
    valid = [reward for reward in rewards if reward is not None]
    random.Random(seed).shuffle(valid)
    shuffled_rewards = iter(valid)
    return [None if reward is None else next(shuffled_rewards) for reward in rewards]
