"""A step's figures: the numbers of its metrics by name, and shares that are derived from them.

Pure functions. A figure that is not known is absent. Whatever number a step publishes is a figure.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from proxy.pool.behaviour.event import Kind
from proxy.pool.untrained import UntrainedReason
from trainer.config.monitor import FAMILIES, Rule

TREND_STEPS = 10
"""Steps before that a trend compares with: enough that one odd step hardly moves their mean."""
FEWEST_STEPS = 3
"""Steps that a trend or a median needs at least."""


def flat(metrics: Mapping[str, Any], oldest: int) -> dict[str, float]:
    """Return the figures of a step. `oldest`: staleness above which groups are dropped; 0: none gets so old."""
    figures: dict[str, float] = {}
    for name, value in metrics.items():
        if is_number(value):
            figures[name] = float(value)
        elif name in FAMILIES and isinstance(value, Mapping):
            figures |= {f"{name}/{key}": float(part) for key, part in value.items() if is_number(part)}
    if "events" in metrics:  # the metric holds those that happened
        figures = {f"events/{kind}": 0.0 for kind in Kind} | figures
    return figures | {name: value for name, value in _derived(metrics, oldest).items() if value is not None}


def compared(rule: Rule, now: Mapping[str, float], before: Sequence[Mapping[str, float]]) -> float | None:
    """Return what a rule compares with its bound. `before`: figures of earlier steps, in order. None: not known."""
    value = now.get(rule.figure)
    if value is None or rule.trend == "none":
        return value
    earlier = [figures[rule.figure] for figures in before[-TREND_STEPS:] if rule.figure in figures]
    if len(earlier) < FEWEST_STEPS:
        return None
    mean = fmean(earlier)
    if rule.trend == "difference":
        return value - mean
    return value / mean if mean else None


def is_number(value: object) -> bool:
    """Whether a metric is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def _derived(metrics: Mapping[str, Any], oldest: int) -> dict[str, float | None]:
    negative, positive = metrics.get("negative_length_p99"), metrics.get("positive_length_p99")
    groups, sampled = metrics.get("groups", 0), metrics.get("sampled_tokens", 0)
    skipped = metrics.get("unused_groups", {}).get(UntrainedReason.EQUAL_REWARDS, 0)
    excluded, seconds = metrics.get("excluded_tokens", {}), metrics.get("seconds", {})
    lost = metrics.get("unaccounted_tokens")
    return {
        "length_ratio": None if negative is None or not positive else negative / positive,
        "stale_group_share": _stale(metrics.get("staleness_groups", {}), oldest),
        "equal_group_share": _share(metrics.get("equal_groups", 0), groups),
        "skipped_group_share": _share(skipped, skipped + groups),
        "impossible_token_share": _share(excluded.get(UntrainedReason.LOGPROB_NOT_FINITE, 0), sampled),
        "too_long_token_share": _share(excluded.get(UntrainedReason.TOO_LONG, 0), sampled),
        "lost_tokens": None if lost is None else abs(lost),
        "wait_share": _share(seconds.get("wait", 0.0), sum(seconds.values())),
    }


def _stale(by_lag: Mapping[str, int], oldest: int) -> float | None:
    """Return the share of groups that are as stale as allowed; None where none may be stale at all."""
    if not oldest or not by_lag:
        return None
    return sum(count for lag, count in by_lag.items() if int(lag) >= oldest) / sum(by_lag.values())


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
