"""What each trained token's loss is multiplied by, so that the batch's loss is one sum however it is split.

All counts are over the whole step, over every rank and micro-batch, and over branches each for itself: tokens that a
tree shares count once per branch that trains them. Masks of a loss (a ratio out of bounds) do not change them.
Left out: which tokens are trained.
"""

from collections.abc import Sequence

from trainer.config.estimators import Norm


def token_scales(
    counts: Sequence[int],
    rollouts: Sequence[int],
    norm: Norm,
    constant: float = 0.0,
    *,
    weights: Sequence[float] | None = None,
) -> list[float]:
    """One scale per sequence: `counts[i]` trained tokens, of rollout `rollouts[i]` (samples of a rollout share it).

    token: 1 / N (MiniMax-M1, DAPO). rollout: each rollout's token mean, then the mean over rollouts (slime).
    constant: 1 / (R L), with `constant` = L (Dr.GRPO, arXiv 2503.20783). mixed: `constant` times the first plus the
    rest times the second (M1, section 5, names the mix without its weight). Rollouts without a trained token do not
    count. A sequence of weight w counts, with its tokens and its rollout, as if it were there w times.
    """
    copies = [1.0] * len(counts) if weights is None else weights
    whole = sum(count * copy for count, copy in zip(counts, copies, strict=True)) or 1
    tokens: dict[int, int] = {}
    for count, rollout in zip(counts, rollouts, strict=True):
        tokens[rollout] = tokens.get(rollout, 0) + count
    of_rollout = dict(zip(rollouts, copies, strict=True))
    members = sum(of_rollout[rollout] for rollout, total in tokens.items() if total) or 1
    by_rollout = [copy / (members * max(1, tokens[rollout])) for rollout, copy in zip(rollouts, copies, strict=True)]
    if norm == "token":
        return [copy / whole for copy in copies]
    if norm == "rollout":
        return by_rollout
    if norm == "constant":
        return [copy / (members * constant) for copy in copies]
    return [constant * copy / whole + (1 - constant) * scale for copy, scale in zip(copies, by_rollout, strict=True)]
