"""Importance ratios between policies, per token or per segment, and the weight that a ratio gives.

A sampled token has up to four logprobs: `rollout` (the engine's, under the weights that sampled it), `old` (the
trainer's, before this batch's update), `logp` (the trainer's, with gradient), `reference` (of a fixed model). All
values here are detached: a weight never carries a gradient. Left out: how weights enter a loss
(trainer/loss/policy_loss.py).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this before exp, so that one absurd token cannot make the sum infinite."""

Level = Literal["token", "sequence", "geometric"]
"""A ratio of each token, of its segment as a product, or of its segment as a geometric mean (GSPO, IPA)."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """w(r): the weight that a ratio gives. One family covers all losses.

    CISPO (MiniMax-M1, arXiv 2506.13585, equation 5) and TIS: clip(r, low, high).
    GLM-5 (arXiv 2602.15763, equation 5): r inside of (low, high), else 0. IcePop (arXiv 2510.18855): the same with
    [low, high]. A plain mask (IPA, arXiv 2512.24873): 1 inside, else 0.
    """

    low: float = 0.0
    high: float = float("inf")
    outside: Literal["clip", "zero"] = "clip"
    inside: Literal["ratio", "one"] = "ratio"
    closed: bool = False
    """Whether a ratio that equals a bound is inside. Matters with `zero` only."""

    def __call__(self, ratio: Tensor) -> Tensor:
        value = torch.ones_like(ratio) if self.inside == "one" else ratio
        if self.outside == "clip":
            return value.clamp(self.low, self.high)
        return torch.where(self.holds(ratio), value, 0.0)

    def holds(self, ratio: Tensor) -> Tensor:
        """[tokens] whether the ratio is inside. Bounds are compared in the ratio's own precision."""
        low, high = ratio.new_full((), self.low), ratio.new_full((), self.high)  # new_tensor would wait for the GPU
        if self.closed:
            return (low <= ratio) & (ratio <= high)
        return (low < ratio) & (ratio < high)


def log_ratio(new: Tensor, base: Tensor, kept: Tensor) -> Tensor:
    """[tokens] log(new / base), clamped to +-20; 0 where `kept` is false, where either may be -inf or NaN."""
    difference = torch.where(kept, new.detach() - base.detach(), 0.0)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def at_level(log_ratios: Tensor, kept: Tensor, segment: Tensor | None, level: Level) -> Tensor:
    """[tokens] each token's log-ratio at a level; 0 where it is not kept. Differentiable. `segment`: number of each
    token's segment, from 0 and without gaps.

    A segment must not be spread over calls. A completion is never cut, so it is the natural segment (a chunk of IPA).
    ValueError when a level needs segments and there are none.
    """
    if level == "token":
        return log_ratios
    if segment is None:
        raise ValueError(f"ratios at level {level} need each token's segment")
    if not len(segment):
        return log_ratios
    weight = kept.to(log_ratios)
    size = len(segment)  # at least the number of segments; the exact one would have to be read back from a GPU
    total = log_ratios.new_zeros(size).index_add(0, segment, log_ratios * weight)
    if level == "geometric":
        total = total / log_ratios.new_zeros(size).index_add(0, segment, weight).clamp_min(
            1
        )  # a segment without kept tokens gives 0 / 1
    return torch.where(kept, total[segment], 0.0)


def ratio(log_ratios: Tensor, kept: Tensor, segment: Tensor | None, level: Level) -> Tensor:
    """[tokens] each token's ratio at a level (`at_level`); 1 where it is not kept."""
    return at_level(log_ratios, kept, segment, level).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def divergences(log_ratios: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[tokens] three estimates of KL(base || new) in nats, for tokens sampled from base: k1, k2, k3 (Schulman 2020).

    Take their means. k1 is unbiased and may be negative, k2 is biased and even, k3 is unbiased and never negative.
    """
    return -log_ratios, 0.5 * log_ratios**2, log_ratios.exp() - 1 - log_ratios
