"""The section [credit] of the trainer's configuration: what a rollout's reward is made of, and which turn gets it.

Left out: the arithmetic (trainer/credit/returns.py, trainer/credit/assign.py).
"""

from typing import Literal

import msgspec

from trainer.config.require import demand


class Credit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    returns: Literal["outcome", "turns"] = "outcome"
    """outcome: every turn gets its rollout's `loss.advantage`. turns: reward-to-go per turn against `baseline`, which
    differs only where turns have process rewards or `gamma` is below 1."""
    gamma: float = 1.0
    """Discount per turn that was still to come. With loss.kind = ipa: of its chunk returns."""
    baseline: Literal["first", "aligned", "none"] = "first"
    """What returns per turn are compared with: the others' returns of their first turn (MiniMax-M2), of the same turn
    (less variance where tasks take equally many turns), or nothing (IPA with signed rewards)."""
    scale: Literal["none", "domain"] = "none"
    """domain: returns per turn are divided by the deviation of first-turn returns over the step's rollouts of a
    domain."""
    process_weight: float = 1.0
    """Of reward parts named `turn:N`, each held to [-1, 1]; counted with returns = turns only."""
    process_bound: float = 0.2
    """What a rollout's process rewards may come to in all; more is scaled down. Otherwise useless steps pay."""
    speed_weight: float = 0.0
    """Of log2(T_base / T) held to [-1, 1], for successful rollouts: T of the critical path, T_base the median of the
    group's other successes."""
    success: float = 1.0
    """The reward from which a rollout counts as successful."""
    tokens_per_second: float = 50.0
    """At which model calls enter T: their real time depends on the batch they were in."""
    overlong_limit: int | None = None
    """Sampled tokens from which a successful rollout's reward is lessened by 1 (DAPO). Absent: none is."""
    overlong_margin: int = 0
    """Tokens below the limit over which the punishment rises."""
    mask_truncated: bool = False
    """Leave rollouts whose last turn was cut at a token limit out of the loss; they stay in the baseline."""
    pad: bool = True
    """Weigh a group with failed members as a whole one (GLM-5's padding): each valid member by size / valid."""

    def __post_init__(self) -> None:
        demand(0 < self.gamma <= 1, f"credit.gamma = {self.gamma} is no discount; keep it above 0 and at most 1")
        for name in ("process_weight", "process_bound", "speed_weight", "overlong_margin"):
            value = msgspec.structs.asdict(self)[name]
            demand(value >= 0, f"credit.{name} = {value} is negative; set it to 0 or more")
        demand(
            self.tokens_per_second > 0,
            f"credit.tokens_per_second = {self.tokens_per_second} lets no call end; set it above 0",
        )
        demand(
            self.overlong_limit is None or self.overlong_limit > self.overlong_margin,
            f"credit.overlong_limit = {self.overlong_limit} is not above credit.overlong_margin = "
            f"{self.overlong_margin}; raise it",
        )
        for name, default in (("baseline", "first"), ("scale", "none")):
            value = msgspec.structs.asdict(self)[name]
            demand(
                self.by_turn or value == default,
                f"credit.{name} = {value} is of returns per turn, and credit.returns = outcome; set that to turns",
            )
        process = 2 * self.process_bound if self.by_turn and self.process_weight else 0.0
        demand(
            not (process or self.speed_weight) or process + self.speed_weight < self.success,
            f"credit.speed_weight = {self.speed_weight} and twice credit.process_bound = {self.process_bound} reach "
            f"credit.success = {self.success}, so that a failure could outdo a success; lower them",
        )

    @property
    def by_turn(self) -> bool:
        return self.returns == "turns"

    @property
    def shaped(self) -> bool:
        """Whether anything but the verifier's reward counts."""
        return bool(self.speed_weight or self.overlong_limit or (self.by_turn and self.process_weight))
