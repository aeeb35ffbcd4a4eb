"""Advantages of rollouts against their own group (GRPO: arXiv 2402.03300; equation 2 of MiniMax-M1, arXiv 2506.13585).

A = (R - mean) / (std + 1e-6), over the members that have a verdict; std is the unbiased one, as in slime, verl and TRL.
Left out: critics, per-turn rewards, leave-one-out baselines.
"""

import random
from collections.abc import Sequence
from statistics import fmean, stdev

ZERO_VARIANCE = 1e-6


def group_relative(rewards: Sequence[float | None]) -> list[float | None] | None:
    """One advantage per member, None where the member has no reward.

    None for the whole group when its rewards do not differ or only one member is valid: it teaches nothing.
    """
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2 or stdev(valid) <= ZERO_VARIANCE:
        return None
    mean, spread = fmean(valid), stdev(valid) + 1e-6
    return [None if reward is None else (reward - mean) / spread for reward in rewards]


def shuffled(rewards: Sequence[float | None], seed: int) -> list[float | None]:
    """The same rewards dealt out at random among the members that have one (the control run)."""
    valid = [reward for reward in rewards if reward is not None]
    random.Random(seed).shuffle(valid)
    dealt = iter(valid)
    return [None if reward is None else next(dealt) for reward in rewards]
