"""The section [optimizer] of the trainer's configuration. Left out: the optimizer (trainer/megatron/optimizer.py)."""

from typing import Literal

import msgspec

from trainer.config.require import demand


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    lr: float = 1e-6
    """Learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up, counted from the first step of the run."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls from the end of the warm-up to `steps`."""
    min_lr: float = 0.0
    """What it falls to."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment."""
    eps: float = 1e-15
    """Adam's epsilon; small, because gradients of large models range from 1e-18 to 1e-5 (MiniMax-M1)."""
    clip: float = 1.0
    """Largest norm of the whole gradient. 0 switches clipping off; the norm is measured all the same."""
    weight_decay: float = 0.0
    """Decoupled weight decay per unit of learning rate."""

    def __post_init__(self) -> None:
        demand(self.lr > 0, f"optimizer.lr = {self.lr} would not learn; set it above 0")
        demand(
            all(0 <= beta < 1 for beta in self.betas),
            f"optimizer.betas = {self.betas} must lie in [0, 1); correct them",
        )
        demand(self.min_lr <= self.lr, f"optimizer.min_lr = {self.min_lr} is above optimizer.lr = {self.lr}; lower it")
        for name in ("warmup_steps", "min_lr", "eps", "clip", "weight_decay"):
            value = msgspec.structs.asdict(self)[name]
            demand(value >= 0, f"optimizer.{name} = {value} is negative; set it to 0 or more")
