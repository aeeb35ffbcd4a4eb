"""The losses, as pure functions over flat vectors with one entry per trained token.

Every function returns the *sum* over its tokens, each times its `scale`. The scales are fixed for the whole batch
(trainer/credit/token_weights.py): over all ranks, micro-batches and branches of trees. So loss and gradient are the
same for any split. The caller gathers each branch's logprobs from those that branches share before it calls these
functions, so the coefficients of branches add up by themselves.
Left out: value functions; how old and reference logprobs are computed.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.loss.ratios import LOG_RATIO_BOUND, Level, Window, at_level, divergences, log_ratio, ratio


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """Trained tokens of a micro-batch: vectors of the same length, one entry per token. Logprobs are in nats."""

    rollout_logp: Tensor
    """What the engine reported when it sampled the token."""
    advantage: Tensor
    mask: Tensor
    """1: in the policy loss. 0: excluded from it, whatever the other entries hold (also -inf or NaN)."""
    scale: Tensor | None = None
    """Factor of each token's loss: the normalisation over the whole batch. None: 1."""
    old_logp: Tensor | None = None
    """The trainer's own logprob before the batch's update. Needed by rules with the anchor `old` or a correction."""
    reference_logp: Tensor | None = None
    """The reference model's logprob. Needed by rules with `kl`."""
    segment: Tensor | None = None
    """Index of each token's completion. Needed by rules with ratios over completions."""
    imitated: Tensor | None = None
    """1: imitated, and excluded from the policy loss. None: no token is."""


@dataclass(frozen=True)
class LossSums:
    """Statistics of a loss function's tokens, which add up over micro-batches and ranks (`read_sums`)."""

    sums: Tensor
    """[statistics]"""
    peak: Tensor
    """The largest ratio, which combines by maximum."""


@dataclass(frozen=True, kw_only=True)
class LossRule:
    """A policy loss. The default is CISPO against the rollout's logprobs.

    There are three forms. r is the ratio, w(r) what the `window` makes of it, sg() takes the gradient away.

    - `score`: -sg(w(r)) A logp.
    - `surrogate`: -min(r A, clip(r, low, high) A), with the gradient through r, at the level of r (PPO, GSPO).
    - `variation`: -keep A r + penalty log(r)^2 (DPPO-TV). keep is 1 where the token's probability moved by less than
      `window.high` in the direction of its advantage, else 0.
    """

    form: Literal["score", "surrogate", "variation"] = "score"
    window: Window = Window(high=5.0)
    level: Level = "token"
    anchor: Literal["rollout", "old"] = "rollout"
    """The denominator of r. `rollout` corrects staleness and the mismatch between engine and trainer at once."""
    correction: Window | None = None
    """A second weight of old / rollout, which r does not contain, for the anchor `old`."""
    correction_level: Level = "token"
    unified: bool = False
    """M1's mask (equations 6-7): 0 for tokens whose ratio is beyond the bound that their advantage's sign selects."""
    only_negatives: bool = False
    """Weigh only tokens of negative advantage; others weigh 1 (TOPR, IPA)."""
    penalty: float = 0.0
    """Coefficient of log(r)^2 in the form `variation`."""
    kl: float = 0.0
    """Coefficient of KL(policy || reference), by the k3 estimate, with gradient."""

    def __post_init__(self) -> None:
        if self.anchor == "rollout" and self.correction is not None:
            raise ValueError("a ratio against the rollout already corrects the mismatch; remove the correction")
        if self.anchor == "old" and self.correction is None:
            raise ValueError("a ratio against recomputed logprobs leaves old / rollout uncorrected; add a correction")
        if self.form == "variation" and self.level != "token":
            raise ValueError(f"the form variation compares each token's own probability, not level {self.level}")

    @property
    def compares_with_old(self) -> bool:
        """Whether it needs the logprobs before a batch's first update."""
        return self.anchor == "old"


def policy_loss(logp: Tensor, tokens: LossTokens, rule: LossRule) -> tuple[Tensor, LossSums]:
    """The summed loss of these tokens under a rule, and its statistics. `logp` [tokens] has the gradient.

    Tokens that are imitated add -s logp, with scale s, and nothing else.

    CISPO, MiniMax-M1 (arXiv 2506.13585), equations 4-5: -sum_t sg(clip(r_t, 0, high)) A_t logp_t. The gradient goes
    through logp only, so a clipped token keeps learning: d loss / d logp_t = -w_t A_t. Raises ValueError when the
    tokens lack logprobs or segments that the rule needs.
    """
    kept = tokens.mask > 0
    advantage = torch.where(kept, tokens.advantage, 0.0)
    logs = log_ratio(logp, _anchor(tokens, rule), kept)
    ratios = ratio(logs, kept, tokens.segment, rule.level)
    extra = _correction(tokens, rule, kept)
    moved = torch.where(kept, logp - logp.detach(), 0.0)  # 0, with the gradient
    through = ratios * at_level(moved, kept, tokens.segment, rule.level).exp()
    losses, weight = _FORMS[rule.form](torch.where(kept, logp, 0.0), ratios, through, advantage, rule)
    losses = extra * losses
    if rule.form == "variation":
        losses = losses + rule.penalty * (torch.where(kept, logp - _anchor(tokens, rule), 0.0)) ** 2
    if rule.kl:
        losses = losses + rule.kl * _kl_to_reference(logp, tokens, kept)
    scale = 1.0 if tokens.scale is None else torch.where(kept, tokens.scale, 0.0)
    # count, r, three estimates of KL(rollout || policy), -logp: the order of `read_sums`
    behaviour = log_ratio(logp, tokens.rollout_logp, kept)
    columns = [torch.ones_like(ratios), ratios, *divergences(behaviour), torch.where(kept, -logp.detach(), 0.0)]
    columns.append((weight != ratios).to(ratios))  # clipped: w != r, without the correction's factor
    total, sums = (scale * losses).sum(), _sum_columns(columns, ratios, weight * extra, advantage, kept)
    if tokens.imitated is None:
        return total, sums
    copied = tokens.imitated > 0
    surprise = torch.where(copied, -logp, 0.0)
    shares = 1.0 if tokens.scale is None else torch.where(copied, tokens.scale, 0.0)
    own = torch.stack((copied.to(ratios).sum(), surprise.detach().sum()))
    return total + (shares * surprise).sum(), LossSums(torch.cat((sums.sums[:-2], own)), sums.peak)


def _score(logp: Tensor, ratios: Tensor, _through: Tensor, advantage: Tensor, rule: LossRule) -> tuple[Tensor, Tensor]:
    """[tokens] losses and weights of the form `score`."""
    weight = rule.window(ratios)
    if rule.unified:
        beyond = (advantage > 0) & (ratios > rule.window.high) | (advantage < 0) & (ratios < rule.window.low)
        weight = torch.where(beyond, 0.0, weight)
    if rule.only_negatives:
        weight = torch.where(advantage < 0, weight, 1.0)
    return -weight * advantage * logp, weight


def _surrogate(
    _logp: Tensor, ratios: Tensor, through: Tensor, advantage: Tensor, rule: LossRule
) -> tuple[Tensor, Tensor]:
    """[tokens] PPO's minimum, with its gradient, and weights. `through`: r with its gradient."""
    plain, clipped = through * advantage, through.clamp(rule.window.low, rule.window.high) * advantage
    losses = -torch.minimum(plain, clipped)
    return losses, torch.where(plain.detach() <= clipped.detach(), ratios, 0.0)


def _variation(
    logp: Tensor, ratios: Tensor, through: Tensor, advantage: Tensor, rule: LossRule
) -> tuple[Tensor, Tensor]:
    """[tokens] losses and weights of the form `variation`, without its penalty."""
    moved = logp.detach().exp() * (1 - 1 / ratios)
    gone = (advantage > 0) & (moved > rule.window.high) | (advantage < 0) & (moved < -rule.window.high)
    return torch.where(gone, 0.0, -through * advantage), torch.where(gone, 0.0, ratios)


_FORMS = {"score": _score, "surrogate": _surrogate, "variation": _variation}


def _anchor(tokens: LossTokens, rule: LossRule) -> Tensor:
    return tokens.rollout_logp if rule.anchor == "rollout" else _given(tokens.old_logp, "old")


def _correction(tokens: LossTokens, rule: LossRule, kept: Tensor) -> Tensor:
    """[tokens] w(old / rollout)."""
    if rule.correction is None:
        return torch.ones_like(tokens.advantage)
    logs = log_ratio(_given(tokens.old_logp, "old"), tokens.rollout_logp, kept)
    return rule.correction(ratio(logs, kept, tokens.segment, rule.correction_level))


def _kl_to_reference(logp: Tensor, tokens: LossTokens, kept: Tensor) -> Tensor:
    """[tokens] the k3 estimate of KL(policy || reference), in nats, with gradient."""
    difference = torch.where(kept, _given(tokens.reference_logp, "reference").detach() - logp, 0.0)
    difference = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return difference.exp() - 1 - difference


def _given(logprobs: Tensor | None, name: str) -> Tensor:
    if logprobs is None:
        raise ValueError(f"this rule needs the {name} logprobs of every token")
    return logprobs


def _sum_columns(columns: list[Tensor], ratios: Tensor, weight: Tensor, advantage: Tensor, kept: Tensor) -> LossSums:
    """Add columns (w = 0, |w A|, and |w A| of negative advantages) and sum all over the tokens."""
    push = weight * advantage.abs()
    nothing = torch.zeros_like(ratios)  # two places for what is imitated
    columns = [*columns, (weight == 0).to(ratios), push, push * (advantage < 0), nothing, nothing]
    sums = torch.stack([torch.where(kept, column, 0.0).sum() for column in columns])
    return LossSums(sums, torch.cat((torch.where(kept, ratios, 0.0), ratios.new_zeros(1))).max())


def read_sums(totals: LossSums) -> dict[str, float]:
    """Means per trained token from the totals; branches of a tree count separately.

    `entropy` is the one-sample estimate, the mean of -logp of the sampled tokens, in nats. `negative_weight_share` is
    the part of sum |w A| that lowers probabilities; it is no share of the gradient.
    """
    count, ratios, k1, k2, k3, surprise, clipped, masked, push, negative, copied, copied_surprise = totals.sums.tolist()
    means = [total / max(count, 1.0) for total in (clipped, masked, ratios, k1, k2, k3, surprise)]
    names = ("clip_fraction", "mask_fraction", "ratio_mean", "kl_rollout_k1", "kl_rollout_k2", "kl_rollout", "entropy")
    share = negative / push if push else 0.0
    imitated = {"imitated_tokens": int(copied), "imitation_loss": copied_surprise / copied} if copied else {}
    policy = dict(zip(names, means, strict=True)) | {"ratio_max": totals.peak.item(), "negative_weight_share": share}
    return policy | imitated


def imitation(logp: Tensor, tokens: LossTokens) -> tuple[Tensor, LossSums]:
    """-sum_t s_t m_t logp_t: the negative log-likelihood of recorded tokens, with scale s and mask m. No statistics."""
    scale = torch.ones_like(logp) if tokens.scale is None else tokens.scale
    loss = -(scale * torch.where(tokens.mask > 0, logp, 0.0)).sum()
    return loss, LossSums(logp.new_zeros(0), logp.new_zeros(()))
