"""Advantages of rollouts against their own group, and what is done about the negative ones.

Statistics are over the members that have a verdict, never over placeholders.
Left out: critics; returns per turn (trainer/credit/returns.py); who is credited with what (trainer/credit/assign.py).
"""

import random
from collections.abc import Sequence
from statistics import fmean, stdev

from proxy.pool.rollouts.failures import enough_valid
from trainer.config.estimators import Estimator

ZERO_VARIANCE = 1e-6


def group_relative(rewards: Sequence[float | None], estimator: Estimator = "grpo") -> list[float | None] | None:
    """One advantage per member, None where the member has no reward.

    grpo: (R - mean) / (std + 1e-6) (arXiv 2402.03300; equation 2 of MiniMax-M1, arXiv 2506.13585), with the unbiased
    std of slime, verl and TRL. dr_grpo: R - mean (arXiv 2503.20783). rloo: R - mean of the others.
    None for the whole group when its rewards do not differ or only one member is valid: it teaches nothing.
    """
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2 or stdev(valid) <= ZERO_VARIANCE:
        return None
    mean = fmean(valid)
    factors = {"grpo": 1 / (stdev(valid) + 1e-6), "dr_grpo": 1.0, "rloo": len(valid) / (len(valid) - 1)}
    return [None if reward is None else (reward - mean) * factors[estimator] for reward in rewards]


def padding_weight(valid: int, size: int) -> float | None:
    """GLM-5's rule for groups with failed members (arXiv 2602.15763): drop unless more than half is valid.

    In place of repeating valid members each one weighs size / valid, which keeps the group's weight and its advantages'
    sum of 0. None: the group is dropped.
    """
    return size / valid if enough_valid(valid, size) else None


def shuffled(rewards: Sequence[float | None], seed: int) -> list[float | None]:
    """The same rewards dealt out at random among the members that have one (the control run)."""
    valid = [reward for reward in rewards if reward is not None]
    random.Random(seed).shuffle(valid)
    dealt = iter(valid)
    return [None if reward is None else next(dealt) for reward in rewards]
