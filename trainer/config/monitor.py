"""The section [monitor] of the trainer's configuration: rules over the figures of each step (docs/monitor.md).

A figure is a number of a step's metrics (docs/training.md), by its name, or `family/key` where a metric has several.
Left out: the rules that every run has (trainer/monitor/builtin.py).
"""

from typing import Annotated, Literal

import msgspec

from proxy.pool.behaviour.event import Kind
from proxy.pool.settings_file import Count, demand

Action = Literal["tell", "mask", "drop_task", "pause", "rollback"]
Trend = Literal["none", "difference", "ratio"]

SCALARS = frozenset(
    """
    reward_mean rollouts valid_rollouts groups dropped_groups equal_groups advantage_mean advantage_std advantage_min
    advantage_max ratio_mean ratio_max clip_fraction mask_fraction entropy kl_rollout kl_rollout_k1 kl_rollout_k2
    kl_fresh extreme_tokens logprob_gap_mean staleness_mean staleness_max staleness_tokens_mean positive_rollouts
    negative_rollouts positive_length_mean positive_length_p50 positive_length_p99 negative_length_mean
    negative_length_p50 negative_length_p99 updates last_ratio_mean last_ratio_max last_clip_fraction
    last_mask_fraction loss grad_norm lr negative_weight_share negative_gradient_share positive_gradient_norm
    negative_gradient_norm sampled_tokens replayed_tokens trained_tokens unaccounted_tokens unplaced_rewards sequences
    computed_tokens flat_tokens call_tokens speedup_tokens speedup_flops speedup_calls_flops flops tokens_per_second mfu
    truncated_share abort_share mtp_loss mtp_grad_norm mtp_length routing_replayed routing_mismatch routing_mismatches
    imitated_tokens imitation_loss length_ratio stale_group_share equal_group_share skipped_group_share
    impossible_token_share too_long_token_share lost_tokens slow_phase wait_share
    """.split()
)
"""Figures without a family: metrics, and what trainer/monitor/figures.py derives from them."""
FAMILIES = frozenset(
    """
    reward_by_domain groups_by_domain tokens_by_domain reward_by_agent groups_by_agent tokens_by_agent share_by_agent
    turns_by_agent length_by_agent unused_groups masked_tokens excluded_tokens left_out_rollouts
    left_out_tokens survival_by_length left_out_by_length behaviour events tool_failure_rate failure_rate_by_domain
    return_deviation seconds
    """.split()
)
"""Metrics of several numbers, each by its key."""
BEHAVIOUR = frozenset(
    """
    turns calls failure_rate repeat_rate characters_per_turn reasoning_share turns_to_first_edit model_seconds
    tool_seconds tool_time_share hacked command_drift
    """.split()
)
"""Keys of `behaviour`."""
OWN = frozenset({"reward_mean", "truncated_share"})
OWN_FAMILIES = frozenset({"behaviour", "events", "tool_failure_rate"})
OWN_LENGTHS = ("positive_length_", "negative_length_")


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table [[monitor.rule]]: a bound of a figure, and what is done when steps in a row break it."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]*\Z")]
    """Its name in metrics, messages and reasons (`monitor: NAME`). A rule with the name of a built-in rule replaces it.
    """
    figure: str
    """The figure: a metric of a step, or `family/key`: `negative_length_p99`, `events/retry_loop`."""
    above: float | None = None
    """The rule is broken above this. Either this or `below`."""
    below: float | None = None
    """The rule is broken below this."""
    trend: Trend = "none"
    """What is compared with the bound. none: the figure. difference: the figure minus its mean over the (at most) 10
    steps before. ratio: the figure divided by that mean."""
    steps: Count = 3
    """Steps in a row that must break the bound before the alarm, and keep it before the alarm is over."""
    action: Action = "tell"
    """What the alarm does. mask: leave out rollouts that break the bound by themselves, as long as it lasts. drop_task:
    open no further groups of tasks whose rollouts break it. pause: stop before the next step, until `trainer continue`.
    rollback: go back to the step before it began, and discard the batches since."""

    def __post_init__(self) -> None:
        rule = f"the rule {self.name!r} of [monitor]"
        demand((self.above is None) != (self.below is None), f"{rule} needs one bound; set either above or below")
        demand(
            known(self.figure),
            f"{rule} reads {self.figure!r}, which is no figure of a step; docs/training.md has the names, and family/"
            "key names one number of several, as in events/retry_loop",
        )
        demand(
            self.action not in ("mask", "drop_task") or (own(self.figure) and self.trend == "none"),
            f"{rule} cannot {self.action.replace('_', ' ')} by {self.figure}, which no rollout has by itself "
            f"(trend = {self.trend}); take a figure of rollouts (docs/monitor.md), or another action",
        )

    @property
    def bound(self) -> float:
        """The bound, above or below."""
        return self.above if self.above is not None else self.below or 0.0

    def breaks(self, value: float) -> bool:
        """Whether a value breaks the bound."""
        return value > self.above if self.above is not None else value < self.bound


class MonitorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [monitor]."""

    rule: tuple[Rule, ...] = ()
    """The rules, besides those that every run has."""

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.rule]
        for name in names:
            demand(names.count(name) == 1, f"two rules of [monitor] have the name {name!r}; rename one")


def known(figure: str) -> bool:
    """Whether steps may have this figure."""
    family, _, key = figure.partition("/")
    if not key:
        return figure in SCALARS
    return family in FAMILIES and {"behaviour": key in BEHAVIOUR, "events": key in set(Kind)}.get(family, True)


def own(figure: str) -> bool:
    """Whether each rollout has this figure by itself."""
    family, _, key = figure.partition("/")
    return figure in OWN or figure.startswith(OWN_LENGTHS) or (family in OWN_FAMILIES and key != "command_drift")
