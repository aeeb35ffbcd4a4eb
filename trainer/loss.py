"""The losses, as pure functions over flat token vectors.

Every function returns the *sum* over the tokens it is given, which the caller divides by a count over the whole batch:
all ranks, all micro-batches. So loss and gradient are the same for any split of a batch.
Left out: KL to a reference model, value functions, and every ratio but the token's own against its rollout logprob.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to this before exp, so that one absurd token cannot make the sum infinite."""


@dataclass(frozen=True)
class Tokens:
    """Trained tokens of a micro-batch, one entry each. `rollout_logp` is what the engine reported when it sampled."""

    rollout_logp: Tensor
    advantage: Tensor
    mask: Tensor
    """1: trained; 0: takes no part, whatever the other entries hold (also -inf or NaN)."""


@dataclass(frozen=True)
class Sums:
    """What a loss function says about its tokens: sums that add up over micro-batches and ranks, and one maximum."""

    sums: Tensor
    peak: Tensor


def cispo(logp: Tensor, tokens: Tokens, floor: float, cap: float) -> tuple[Tensor, Sums]:
    """-sum_t sg(clip(r_t, floor, cap)) A_t logp_t with r_t = exp(logp_t - rollout_logp_t).

    CISPO, MiniMax-M1 (arXiv 2506.13585), equations 4-5; `cap` is the bound itself, 1 + epsilon_high there. The gradient
    goes through logp only, so a clipped token keeps learning with weight `cap`: d loss / d logp_t = -w_t A_t.
    The ratio is against the rollout's logprob, which corrects staleness and engine mismatch in one.
    """
    kept = tokens.mask > 0
    # Choose before exp: a masked entry may hold -inf, and inf * 0 would be NaN.
    reference = torch.where(kept, tokens.rollout_logp, logp.detach())
    log_ratio = (logp.detach() - reference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight = log_ratio.exp().clamp(floor, cap)
    advantage = torch.where(kept, tokens.advantage, 0.0)
    losses = -weight * advantage * torch.where(kept, logp, 0.0)
    return losses.sum(), _describe(logp.detach(), log_ratio, weight, kept)


def _describe(logp: Tensor, log_ratio: Tensor, weight: Tensor, kept: Tensor) -> Sums:
    """In order: count, clipped (w != r), r, the k3 estimate of KL(rollout || policy) (r - 1 - log r), -logp."""
    ratio = log_ratio.exp()
    columns = (torch.ones_like(ratio), (weight != ratio).to(ratio), ratio, ratio - 1 - log_ratio, -logp)
    sums = torch.stack([torch.where(kept, column, 0.0).sum() for column in columns])
    return Sums(sums, torch.cat((torch.where(kept, ratio, 0.0), ratio.new_zeros(1))).max())


def read_sums(totals: Sums) -> dict[str, float]:
    """Means per trained token; `entropy` is the one-sample estimate, the mean of -logp of the sampled tokens."""
    count, clipped, ratio, kl, surprise = totals.sums.tolist()
    means = [total / max(count, 1.0) for total in (clipped, ratio, kl, surprise)]
    names = ("clip_fraction", "ratio_mean", "kl_rollout", "entropy")
    return dict(zip(names, means, strict=True)) | {"ratio_max": totals.peak.item()}


def imitation(logp: Tensor, tokens: Tokens) -> tuple[Tensor, Sums]:
    """-sum_t m_t logp_t: the negative log-likelihood of recorded tokens."""
    loss = -torch.where(tokens.mask > 0, logp, 0.0).sum()
    return loss, Sums(logp.new_zeros(0), logp.new_zeros(()))
