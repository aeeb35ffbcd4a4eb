"""Alarms: metrics above their thresholds, which a person should look at before the run is lost.

Pure functions over a step's metrics. An alarm stops nothing. Not here: trends over steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.pool.untrained import UntrainedReason
from trainer.config.report import AlarmName

Metrics = Mapping[str, Any]


@dataclass(frozen=True)
class Alarm:
    """A metric above its threshold."""

    name: str
    """Key of THRESHOLDS, or `unaccounted_tokens`."""
    value: float
    threshold: float

    def text(self) -> str:
        """Return one sentence: the value, its threshold and what it may mean."""
        return f"{self.name} = {self.value:.4g} is above {self.threshold:g}: {MEANING[self.name]}"


THRESHOLDS: dict[AlarmName, float] = {
    # p99 of the lengths of rollouts below their group's mean reward, over that of those above (ROLL)
    "length_ratio": 1.5,
    # share of the gradient norm, in the steps that report.negative_gradient_every measures (ROLL)
    "negative_gradient_share": 0.7,
    # share of sum |w A|, in every step: stands in for the share of the gradient where that is not measured
    "negative_weight_share": 0.7,
    # KL(rollout || policy) per token: engine mismatch and staleness together; runs were reported to collapse there
    "kl_rollout": 0.013,
    # share of trained tokens whose probability differs by more than twice from the rollout's (F(2), arXiv 2510.11370)
    "extreme_tokens": 0.1,
    # share of trained tokens whose weight is not their ratio
    "clip_fraction": 0.45,
    # with batch.schedule = greedy: share of the step's groups that are as stale as batch.max_staleness allows
    "stale_groups": 0.5,
    # share of the step's groups whose rewards are all equal: there is little left to learn from
    "equal_groups": 0.9,
    # with batch.refill: share of the groups since the step before that were skipped because their rewards are equal
    "skipped_groups": 0.7,
    # share of sampled tokens whose recorded logprob is not finite
    "impossible_tokens": 0.001,
    # share of sampled tokens whose paths are longer than batch.max_tokens
    "too_long_tokens": 0.01,
}
"""Constants: each is a value from the literature or one that healthy runs stay far below. `report.silent_alarms`
switches an alarm off."""
MEANING = {
    "length_ratio": "failed rollouts are long, so long contexts are pushed down; see loss.negative_longest",
    "negative_gradient_share": "the step mostly pushes tokens down; see loss.negative_weight",
    "negative_weight_share": "the step's weights mostly push tokens down; see loss.negative_weight",
    "kl_rollout": "trainer and engine disagree, or the rollouts are too stale; see kl_fresh and `trainer logprobs`",
    "extreme_tokens": "many logprobs are far from those that the engine reported; see kl_fresh and `trainer logprobs`",
    "clip_fraction": "the loss clips a large part of the tokens; see kl_rollout and batch.max_staleness",
    "stale_groups": "rollouts come too late and will be dropped; add engines or choose another batch.schedule",
    "equal_groups": "the tasks are too easy or too hard to tell rollouts apart",
    "skipped_groups": "most sampling is for groups that teach nothing, and the rest are few tasks; change the tasks",
    "impossible_tokens": "the engine reports logprobs that no sampled token can have; see the sampling parameters",
    "too_long_tokens": "the longest rollouts are not learned from to their end; raise batch.max_tokens",
    "unaccounted_tokens": "sampled tokens are neither trained nor excluded, which is a bug in the trainer",
}


def raised(metrics: Metrics, silent: Sequence[str], max_staleness: int) -> list[Alarm]:
    """Return the alarms of a step. An absent metric raises none; lost tokens always raise one.

    `max_staleness`: above it, groups are dropped; 0 where the schedule lets none get so old.
    """
    alarms = []
    for name, threshold in THRESHOLDS.items():
        value = _DERIVED[name](metrics, max_staleness) if name in _DERIVED else metrics.get(name)
        if name not in silent and value is not None and value > threshold:
            alarms.append(Alarm(name, value, threshold))
    if metrics.get("unaccounted_tokens"):
        alarms.append(Alarm("unaccounted_tokens", metrics["unaccounted_tokens"], 0))
    return alarms


def length_ratio(metrics: Metrics) -> float | None:
    """Divide the p99 of the negatives' lengths by that of the positives; None where a side is missing."""
    negative, positive = metrics.get("negative_length_p99"), metrics.get("positive_length_p99")
    return negative / positive if negative is not None and positive else None


def stale_groups(metrics: Metrics, max_staleness: int) -> float | None:
    """Return the share of groups that are as stale as allowed; None where none may be stale at all."""
    by_lag = metrics.get("staleness_groups", {})
    if not max_staleness or not by_lag:
        return None
    return sum(count for lag, count in by_lag.items() if int(lag) >= max_staleness) / sum(by_lag.values())


def skipped_groups(metrics: Metrics) -> float | None:
    """Return the share of groups that the step skipped for equal rewards, of those and the ones that it took."""
    skipped = metrics.get("unused_groups", {}).get(UntrainedReason.EQUAL_REWARDS, 0)
    return _share(skipped, skipped + metrics.get("groups", 0))


def _excluded_share(metrics: Metrics, reason: UntrainedReason) -> float | None:
    return _share(metrics.get("excluded_tokens", {}).get(reason, 0), metrics.get("sampled_tokens", 0))


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


_DERIVED: dict[str, Callable[[Metrics, int], float | None]] = {
    "length_ratio": lambda metrics, _: length_ratio(metrics),
    "stale_groups": stale_groups,
    "equal_groups": lambda metrics, _: _share(metrics.get("equal_groups", 0), metrics.get("groups", 0)),
    "skipped_groups": lambda metrics, _: skipped_groups(metrics),
    "impossible_tokens": lambda metrics, _: _excluded_share(metrics, UntrainedReason.LOGPROB_NOT_FINITE),
    "too_long_tokens": lambda metrics, _: _excluded_share(metrics, UntrainedReason.TOO_LONG),
}
