"""The sections [report] and [alarms] of the trainer's configuration."""

from typing import Literal

import msgspec

from proxy.pool.errors import UserError


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tensorboard: bool = True
    """Write event files to `tensorboard` in the output directory. The pool has every metric in any case."""
    wandb: str = ""
    """Weights & Biases project to log to as well. Empty: none. Needs `pip install 'blackforge[wandb]'`."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline writes to `wandb` in the output directory, for `wandb sync` to send later."""
    keep_tokens: int = 50
    """Steps whose tokens `trainer inspect` can show exactly: 8 to 20 bytes for a trained token. 0: none
    is recorded."""
    negative_gradient_every: int = 0
    """Steps between two measurements of the negatives' share of the gradient norm, each of which costs two further
    forward and backward passes. 0: it is never measured."""

    def __post_init__(self) -> None:
        for name in ("keep_tokens", "negative_gradient_every"):
            value = msgspec.structs.asdict(self)[name]
            if value < 0:
                raise UserError(f"report.{name} = {value} is negative; set it to 0 or more")


class Alarms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A metric above its threshold is an alarm: printed, an event in the pool, a metric. 0 switches one off."""

    length_ratio: float = 1.5
    """p99 of the lengths of rollouts below their group's mean reward, over that of those above (ROLL)."""
    negative_gradient_share: float = 0.7
    """Of the gradient norm, in the steps that `report.negative_gradient_every` measures (ROLL)."""
    negative_weight_share: float = 0.7
    """Of sum |w A|, in every step: what stands in for the share of the gradient where that is not measured."""
    kl_rollout: float = 0.013
    """KL(rollout || policy) per token: engine mismatch and staleness together. Runs were reported to collapse there."""
    extreme_tokens: float = 0.1
    """Share of trained tokens whose probability differs by more than twice from the rollout's (F(2), arXiv
    2510.11370)."""
    clip_fraction: float = 0.45
    """Share of trained tokens whose weight is not their ratio."""
    stale_groups: float = 0.5
    """Share of the step's groups that are as stale as `batch.max_staleness` allows; the next ones may be dropped."""
    equal_groups: float = 0.9
    """Share of the step's groups whose rewards are all equal: there is little left to learn from."""
    impossible_tokens: float = 0.001
    """Share of sampled tokens whose recorded logprob is not finite."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if not 0 <= value < float("inf"):
                raise UserError(f"alarms.{name} = {value} is no threshold; set a number above 0, or 0 for no alarm")
