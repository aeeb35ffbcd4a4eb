"""The section [report] of the trainer's configuration. Left out: the alarms' bounds (trainer/monitor/builtin.py)."""

from typing import Literal

import msgspec

from proxy.pool.settings_file import NotNegative, Port

AlarmName = Literal[
    "slow_phase",
    "aborts",
    "equal_groups",
    "skipped_groups",
    "truncated_rollouts",
    "length_ratio",
    "negative_gradient_share",
    "negative_weight_share",
    "kl_rollout",
    "extreme_tokens",
    "clip_fraction",
    "impossible_tokens",
    "too_long_tokens",
    "stale_groups",
    "waiting",
]


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [report]."""

    wandb: str = ""
    """Weights & Biases project to log to. Empty: none. Needs `pip install 'blackforge[wandb]'`; WANDB_MODE=offline
    writes to `wandb` in the output directory, for `wandb sync` to send later."""
    metrics_port: Port = 0
    """Port of this machine's loopback that serves the newest step's metrics to Prometheus, at /metrics. 0: none; the
    file metrics.prom in the output directory has them anyway."""
    negative_gradient_every: NotNegative = 0
    """Steps between two measurements of the negatives' share of the gradient norm, each of which costs two further
    forward and backward passes. 0: never measured."""
    silent_alarms: tuple[AlarmName, ...] = ()
    """Rules of every run that are not watched (docs/monitor.md)."""
