"""The section [optimizer] of the trainer's configuration. Left out: the optimizer (trainer/megatron/optimizer.py)."""

from typing import Annotated, Literal

import msgspec

from proxy.pool.settings_file import NotNegative, Positive, Weight, demand

SMALLEST_EPS = 1e-22
"""In fp32 the square of a smaller gradient is 0. So a smaller epsilon would be all that such a gradient is divided by,
and the step would be many times the learning rate; with 0, a weight without a gradient would become 0 / 0."""


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [optimizer]."""

    BETAS = (0.9, 0.95)
    """Adam's decay rates of the first and second moment: those that MiniMax-M1 and the recipes around it agree on."""

    lr: Positive = 1e-6
    """Learning rate after the warm-up."""
    warmup_steps: NotNegative = 0
    """Steps of linear warm-up, counted from the first step of the run."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from the end of the warm-up to the step after `steps`."""
    min_lr: Weight = 0.0
    """Learning rate at the end of the decay, so of no step: with 0 the last step still learns."""
    eps: Annotated[float, msgspec.Meta(ge=SMALLEST_EPS)] = 1e-15
    """Adam's epsilon; small, because gradients of large models range from 1e-18 to 1e-5 (MiniMax-M1). At
    least 1e-22, since the squares of smaller gradients are 0 in fp32."""
    clip: Weight = 1.0
    """Maximum norm of the whole gradient. 0: no clipping; the norm is measured anyway."""
    weight_decay: Weight = 0.0
    """Decoupled weight decay per unit of learning rate, of matrices only: norms and biases keep their size."""

    def __post_init__(self) -> None:
        demand(self.min_lr <= self.lr, f"optimizer.min_lr = {self.min_lr} is above optimizer.lr = {self.lr}; lower it")
        demand(
            not self.min_lr or self.decay != "constant",
            f"optimizer.min_lr = {self.min_lr} is not used by optimizer.decay = constant; set that to linear or "
            "cosine, or remove it",
        )
