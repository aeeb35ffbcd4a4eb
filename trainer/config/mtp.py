"""The section [mtp] of the trainer's configuration: the multi-token-prediction head.

Left out: how many tokens the engine drafts, which its command line says.
"""

import msgspec

from proxy.pool.settings_file import NotNegative, Weight, demand


class Mtp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The multi-token-prediction head that the engine drafts with. It never changes the policy's gradient."""

    LIKELIEST = 20
    """The policy's likeliest tokens whose probabilities the head learns one by one; all others count as one. They hold
    nearly all of the probability, at a fraction of the memory of whole distributions."""

    drafts: NotNegative = 0
    """Tokens after the next one that the head learns to draft, by applying its one layer repeatedly: the engine's
    --speculative-num-steps. 0: the head is not trained; a head in `model` is exported unchanged."""
    lr: Weight | None = None
    """Learning rate of the head's own optimizer, which warms up and decays as the policy's. 0: leave the head unchanged
    and only measure its acceptance. Default: optimizer.lr."""

    def __post_init__(self) -> None:
        demand(
            self.lr is None or self.drafts > 0,
            f"mtp.lr = {self.lr} is of the head that mtp.drafts = 0 does not train; set that above 0, or remove it",
        )
