"""Choices of the section [loss] that the credit arithmetic takes: estimator, normalization, weight of negatives."""

from dataclasses import dataclass
from typing import Literal

Estimator = Literal["grpo", "dr_grpo", "rloo"]
Norm = Literal["token", "rollout", "constant", "mixed"]


@dataclass(frozen=True, kw_only=True)
class Negatives:
    """What negative advantages weigh; applied after the baseline, so that positives keep theirs."""

    positive_only_until: int = 0
    """Steps that learn from positive advantages only."""
    weight: float = 1.0
    longest: int | None = None
    """A failed rollout with more trained tokens is left out: failures that ramble on push long contexts down."""

    def factor(self, advantage: float, tokens: int, step: int) -> float:
        """What to multiply the advantage of a rollout of so many trained tokens by, in this step (from 1)."""
        if advantage >= 0:
            return 1.0
        if step <= self.positive_only_until or (self.longest is not None and tokens > self.longest):
            return 0.0
        return self.weight
