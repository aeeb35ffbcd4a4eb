"""Figures of a step's rollouts, all together and one by one: what they did, how long they are.

A rollout that the monitor has masked still counts in them, or its rule would lose sight of what it masks.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from proxy.pool.behaviour.statistics import Statistics, drift, of_rollout
from proxy.pool.completions.records import CUT_FINISH_REASONS
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout
from proxy.pool.untrained import UntrainedReason
from trainer.credit.assign import turns_of
from trainer.data.assemble import why_not_trainable

UNKNOWN = "unknown"
COMMANDS = 50
"""The most frequent commands of a step, which its metrics keep."""


def unmasked(groups: Iterable[LeasedGroup]) -> list[LeasedGroup]:
    """Return the groups as they were before the monitor masked some of their rollouts."""
    return [
        replace(
            group,
            rollouts=[
                replace(member, untrained=None)
                if member.untrained is not None and member.untrained.reason == UntrainedReason.MONITOR
                else member
                for member in group.rollouts
            ],
        )
        for group in groups
    ]


def behaviour(groups: Sequence[LeasedGroup], first: Mapping[str, float]) -> dict[str, Any]:
    """Summarise what the rollouts did; `first`: the commands of the run's first step."""
    whole, by_domain = Statistics(), defaultdict[str, Statistics](Statistics)
    for group in groups:
        for member in group.rollouts:
            figures = of_rollout(member.completions, member.reward, member.hacked)
            whole.merge(figures)
            by_domain[str(group.task.get("domain", UNKNOWN))].merge(figures)
    means = {domain: part.means() for domain, part in sorted(by_domain.items())}
    counts = dict(whole.commands.most_common(COMMANDS))
    moved = drift(counts, first)
    rates = {domain: each["failure_rate"] for domain, each in means.items() if "failure_rate" in each}
    return {
        "behaviour": {name: value for name, value in whole.means().items() if name != "reward"}
        | ({} if moved is None else {"command_drift": moved}),
        "events": whole.events_per_rollout(),
        "tool_failure_rate": {tool: part.failed / part.known for tool, part in whole.tools.items() if part.known},
        "failure_rate_by_domain": rates,
        "command_counts": counts,
    }


def rewarded(group: LeasedGroup) -> list[tuple[float, LeasedRollout]]:
    """Return the members with a verdict, each with it."""
    return [(verdict, member) for member in group.rollouts if (verdict := member.verdict) is not None]


def lengths(groups: Iterable[LeasedGroup], labels: Sequence[str]) -> dict[str, Any]:
    """Summarise the trainable tokens per rollout, of rollouts above (positive) and below their group's mean reward.

    Counts both, and the share of all rollouts whose last turn was cut at a token limit.
    """
    sides: dict[str, list[int]] = {"positive": [], "negative": []}
    cut = Counter[bool]()
    for group in unmasked(groups):
        for member in group.rollouts:
            if turns_of(member, labels):
                cut[_truncated(member, labels)] += 1
        for side, member in by_side(group):
            sides[side].append(_length(member, labels))
    metrics: dict[str, Any] = {f"{side}_rollouts": len(values) for side, values in sides.items()}
    if cut:
        metrics["truncated_share"] = cut[True] / cut.total()
    for side, values in sides.items():
        if values:
            middle, high = np.percentile(values, (50, 99))
            metrics |= {
                f"{side}_length_mean": fmean(values),
                f"{side}_length_p50": float(middle),
                f"{side}_length_p99": float(high),
            }
    return metrics


def by_side(group: LeasedGroup) -> list[tuple[str, LeasedRollout]]:
    """Return the members above (`positive`) and below (`negative`) the group's mean reward; the others are neither."""
    members = rewarded(group)
    mean = fmean([reward for reward, _ in members]) if members else 0.0
    return [("positive" if reward > mean else "negative", member) for reward, member in members if reward != mean]


def own_figures(groups: Iterable[LeasedGroup], labels: Sequence[str]) -> dict[int, dict[str, float]]:
    """Return the figures that each rollout has by itself, by its id: those that trainer/config/monitor.py calls own."""
    figures = {}
    for group in unmasked(groups):
        sides = {member.rollout_id: side for side, member in by_side(group)}
        for member in group.rollouts:
            done = of_rollout(member.completions, member.reward, member.hacked)
            mine = {f"behaviour/{name}": value for name, value in done.means().items() if name != "reward"}
            mine |= {f"events/{kind}": float(count) for kind, count in done.events.items()}
            mine |= {f"tool_failure_rate/{tool}": each.failed / each.known for tool, each in done.tools.items()
                     if each.known}  # fmt: skip
            if member.reward is not None:
                mine["reward_mean"] = member.reward
            if turns_of(member, labels):
                mine["truncated_share"] = float(_truncated(member, labels))
            if side := sides.get(member.rollout_id):
                size = float(_length(member, labels))
                mine |= {f"{side}_length_{name}": size for name in ("mean", "p50", "p99")}
            figures[member.rollout_id] = mine
    return figures


def _truncated(member: LeasedRollout, labels: Sequence[str]) -> bool:
    return turns_of(member, labels)[-1].finish_reason in CUT_FINISH_REASONS


def _length(member: LeasedRollout, labels: Sequence[str]) -> int:
    return sum(item.sampled_count for item in member.completions if why_not_trainable(item, labels) is None)
