"""The section [mtp] of the trainer's configuration: the multi-token-prediction head.

Left out: how many tokens the engine drafts, which its command line says.
"""

import msgspec

from trainer.config.require import demand


class Mtp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The multi-token-prediction head that the engine drafts with. It never changes the policy's gradient."""

    drafts: int = 0
    """Tokens after the next that the head learns to draft, by its one layer used again: the engine's
    --speculative-num-steps. 0: no head is trained; one that stands in `model` is exported as it is."""
    train: bool = True
    """False: the head stays as it is and only its acceptance is measured."""
    k: int = 20
    """The policy's likeliest tokens whose probabilities the head learns one by one; the others count as one."""
    lr: float | None = None
    """Learning rate of its own optimizer, which warms up and decays as the policy's. Absent: optimizer.lr."""

    def __post_init__(self) -> None:
        demand(self.drafts >= 0, f"mtp.drafts = {self.drafts} is negative; set it to 0 or more")
        demand(self.k >= 1, f"mtp.k = {self.k} compares no token; set it to 1 or more")
        demand(self.lr is None or self.lr > 0, f"mtp.lr = {self.lr} would not learn; set it above 0")
