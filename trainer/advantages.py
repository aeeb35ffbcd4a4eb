"""Advantages of rollouts against their own group, and what is done about the negative ones.

Statistics are over the members that have a verdict, never over placeholders.
Left out: critics; returns per turn (trainer/credit.py); who is credited with what (trainer/assign.py).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

ZERO_VARIANCE = 1e-6
Estimator = Literal["grpo", "dr_grpo", "rloo"]


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
    return size / valid if 2 * valid > size else None


@dataclass(frozen=True, kw_only=True)
class Negatives:
    """What negative advantages weigh; applied after the baseline, so that positives keep theirs."""

    positive_only_until: int = 0
    """Steps that learn from positive advantages only."""
    ramp_steps: int = 0
    """Steps over which the weight then rises from 0 to `weight`."""
    weight: float = 1.0
    longest: int | None = None
    """A failed rollout with more trained tokens is left out: failures that ramble on push long contexts down."""

    def factor(self, advantage: float, tokens: int, step: int) -> float:
        """What to multiply the advantage of a rollout of so many trained tokens by, in this step (from 1)."""
        if advantage >= 0:
            return 1.0
        if step <= self.positive_only_until or (self.longest is not None and tokens > self.longest):
            return 0.0
        past = step - self.positive_only_until
        return self.weight * min(1.0, past / self.ramp_steps if self.ramp_steps else 1.0)


def shuffled(rewards: Sequence[float | None], seed: int) -> list[float | None]:
    """The same rewards dealt out at random among the members that have one (the control run)."""
    valid = [reward for reward in rewards if reward is not None]
    random.Random(seed).shuffle(valid)
    dealt = iter(valid)
    return [None if reward is None else next(dealt) for reward in rewards]
