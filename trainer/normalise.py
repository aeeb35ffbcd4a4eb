"""What each trained token's loss is multiplied by, so that the batch's loss is one sum however it is split.

All counts are over the whole step, over every rank and micro-batch, and over branches each for itself: tokens that a
tree shares count once per branch that trains them. Masks of a loss (a ratio out of bounds) do not change them.
Left out: which tokens are trained.
"""

from collections.abc import Sequence
from typing import Literal

Norm = Literal["token", "rollout", "constant", "mixed"]


def token_scales(counts: Sequence[int], rollouts: Sequence[int], norm: Norm, constant: float = 0.0) -> list[float]:
    """One scale per sequence: `counts[i]` trained tokens, of rollout `rollouts[i]` (samples of a rollout share it).

    token: 1 / N (MiniMax-M1, DAPO). rollout: each rollout's token mean, then the mean over rollouts (slime).
    constant: 1 / (R L), with `constant` = L (Dr.GRPO, arXiv 2503.20783). mixed: `constant` times the first plus the
    rest times the second (M1, section 5, names the mix without its weight). Rollouts without a trained token do not
    count.
    """
    whole = max(1, sum(counts))
    tokens: dict[int, int] = {}
    for count, rollout in zip(counts, rollouts, strict=True):
        tokens[rollout] = tokens.get(rollout, 0) + count
    members = max(1, sum(total > 0 for total in tokens.values()))
    by_rollout = [1 / (members * max(1, tokens[rollout])) for rollout in rollouts]
    if norm == "token":
        return [1 / whole] * len(counts)
    if norm == "rollout":
        return by_rollout
    if norm == "constant":
        return [1 / (members * constant)] * len(counts)
    return [constant / whole + (1 - constant) * scale for scale in by_rollout]
