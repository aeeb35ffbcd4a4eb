"""The metrics of a step, as the pool keeps them, and the line that the terminal shows.

docs/training.md says what each is. Pure functions over what the step used. What is not known is absent, never 0 or a
guess. Left out: where else metrics are written (trainer/report/exporters.py).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from proxy.pool.completions.records import Completion
from proxy.pool.training.steps import Version
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout
from proxy.pool.untrained import to_metrics
from trainer.config import TRAINED
from trainer.config.model_shape import Shape
from trainer.data.assemble import TrainingBatch, why_not_trainable
from trainer.data.row import TrainingRow
from trainer.loss.policy_loss import read_sums
from trainer.policy import Update
from trainer.report.flops import Work, flops, merged, separate
from trainer.report.tokens import Notes

UNKNOWN = "unknown"
EXTREME = float(np.log(2))
DECILES = 10


@dataclass(frozen=True)
class Facts:
    """What a step used and what came of it."""

    step: int
    groups: Sequence[LeasedGroup]
    batch: TrainingBatch
    micros: Sequence[Sequence[Sequence[TrainingRow]]]
    """[data rank][micro-batch] -> rows."""
    update: Update
    notes: Mapping[int, Notes]
    """What the loss gave the tokens of each computed row, by the row's id()."""
    gradient_shares: Mapping[str, float]
    """Metrics of the gradients of both signs; empty in steps that do not measure them."""
    seconds: dict[str, float]
    """Of each part of the step so far."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What stays the same over the steps of a run."""

    shape: Shape
    labels: Sequence[str] = TRAINED
    peak: float | None = None
    """FLOPs per second that all devices together could do; None where that is not known."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """The step of every weight version of the run."""


def describe(facts: Facts, setting: Setting) -> dict[str, Any]:
    """The metrics of a step; those of the policy's tokens are absent when nothing could be learned."""
    completions = {item.id: item for item in sampled(facts.groups)}
    ages = {
        id(row): lags(row, completions, setting.versions, facts.step - 1) for row in facts.batch.rows if row.completions
    }
    said = {
        "loss": facts.update.loss,
        "grad_norm": facts.update.grad_norm,
        "lr": facts.update.learning_rate,
        **facts.gradient_shares,
        "seconds": facts.seconds,
        "sequences": len(facts.batch.rows),
    }
    return (
        (read_sums(facts.update.sums) if facts.update.sums else {})
        | (facts.update.drafts.metrics() if facts.update.drafts else {})
        | said
        | facts.update.routing
        | rewards(facts.groups, facts.batch)
        | advantages(facts.batch.rows)
        | lengths(facts.groups, setting.labels)
        | staleness(facts.groups, ages.values())
        | mismatch(facts.batch.rows, facts.notes, ages)
        | survival(completions.values(), facts.batch)
        | survival_by_length(facts.groups, facts.batch.rows)
        | sizes(facts, setting, completions)
    )


def sampled(groups: Iterable[LeasedGroup]) -> list[Completion]:
    """Every completion of these groups."""
    return [item for group in groups for member in group.rollouts for item in member.completions]


def rewards(groups: Sequence[LeasedGroup], batch: TrainingBatch) -> dict[str, Any]:
    """Rewards as the verifiers gave them, of the members that have a verdict."""
    by_domain: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        by_domain[str(group.task.get("domain", UNKNOWN))] += [reward for reward, _ in _judged(group)]
    mean = {"reward_mean": fmean(batch.rewards)} if batch.rewards else {}  # of none there is none: it is not 0
    return mean | {
        "reward_by_domain": {domain: fmean(found) for domain, found in sorted(by_domain.items()) if found},
        "rollouts": sum(len(group.rollouts) for group in groups),
        "valid_rollouts": len(batch.rewards),
        "groups": len(groups),
        "dropped_groups": batch.dropped_groups,
        "equal_groups": sum(len({reward for reward, _ in _judged(group)}) == 1 for group in groups),
    }


def _judged(group: LeasedGroup) -> list[tuple[float, LeasedRollout]]:
    return [(verdict, member) for member in group.rollouts if (verdict := member.verdict) is not None]


def advantages(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """Of the trained tokens, each with the advantage that its loss has."""
    values = _joined(row.advantage[row.places] for row in rows)
    if not len(values):
        return {}
    return {
        "advantage_mean": float(values.mean(dtype=np.float64)),
        "advantage_std": float(values.std(dtype=np.float64)),
        "advantage_min": float(values.min()),
        "advantage_max": float(values.max()),
    }


def lengths(groups: Sequence[LeasedGroup], labels: Sequence[str]) -> dict[str, float]:
    """Trainable tokens of a rollout over all its turns: of rollouts above their group's mean reward, and below it."""
    found: dict[str, list[int]] = {"positive": [], "negative": []}
    for group in groups:
        judged = _judged(group)
        mean = fmean([reward for reward, _ in judged]) if judged else 0.0
        for reward, member in judged:
            size = sum(len(item.sampled) for item in member.completions if why_not_trainable(item, labels) is None)
            if reward != mean:
                found["positive" if reward > mean else "negative"].append(size)
    said: dict[str, float] = {}
    for side, values in found.items():
        if values:
            middle, high = np.percentile(values, (50, 99))
            said |= {
                f"{side}_length_mean": fmean(values),
                f"{side}_length_p50": float(middle),
                f"{side}_length_p99": float(high),
            }
    return said


def lags(
    row: TrainingRow, completions: Mapping[int, Completion], versions: Mapping[str, int], current: int
) -> np.ndarray:
    """Published steps between the weights that sampled each trained token and those that it updates; -1: not known."""
    ages = np.full(len(row.tokens), -1, dtype=np.int64)
    for name in row.completions:
        item = completions[name]
        for span in item.versions:
            if span.version in versions:
                place = slice(item.prompt_length + span.start, item.prompt_length + span.end)
                ages[place] = current - versions[span.version]
    return ages[row.places]


def staleness(groups: Sequence[LeasedGroup], ages: Iterable[np.ndarray]) -> dict[str, Any]:
    """Of groups (their oldest token) and of trained tokens, as histograms from lag to count."""
    by_group = [group.staleness for group in groups]
    tokens = _joined(ages).astype(np.int64)
    known = tokens[tokens >= 0]
    said: dict[str, Any] = {
        "staleness_mean": sum(by_group) / len(by_group),
        "staleness_max": max(by_group),
        "staleness_groups": _counted(np.array(by_group)),
        "staleness_tokens": _counted(tokens),
    }
    return said | ({"staleness_tokens_mean": float(known.mean())} if len(known) else {})


def _counted(values: np.ndarray) -> dict[str, int]:
    found = Counter(values.tolist())
    return {UNKNOWN if lag < 0 else str(lag): found[lag] for lag in sorted(found)}


def mismatch(
    rows: Sequence[TrainingRow], notes: Mapping[int, Notes], ages: Mapping[int, np.ndarray]
) -> dict[str, float]:
    """Trainer against engine, per trained token; `kl_fresh` of those that the current weights sampled, where no
    staleness is in it.
    """
    known = [row for row in rows if id(row) in notes]
    logs = _joined(notes[id(row)].logp - row.rollout_logp[row.places] for row in known).astype(np.float64)
    if not len(logs):
        return {}
    fresh = _joined(ages.get(id(row), np.full(len(row.places), -1)) == 0 for row in known).astype(bool)
    said = {"extreme_tokens": float((np.abs(logs) > EXTREME).mean()), "logprob_gap_mean": float(np.abs(logs).mean())}
    if fresh.any():
        clamped = logs[fresh].clip(-20, 20)
        said["kl_fresh"] = float((np.exp(clamped) - 1 - clamped).mean())
    return said


def survival(completions: Iterable[Completion], batch: TrainingBatch) -> dict[str, Any]:
    """Where every sampled token of the step went."""
    every = sum(len(item.sampled) for item in completions)
    return {
        "sampled_tokens": every,
        "trained_tokens": batch.tokens,
        "excluded_tokens": to_metrics(batch.excluded),
        "masked_tokens": to_metrics(batch.masked),
        "unplaced_rewards": batch.unplaced_rewards,
        "unaccounted_tokens": every - batch.tokens - sum(batch.excluded.values()),
    }


def survival_by_length(groups: Sequence[LeasedGroup], rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """Share of the sampled tokens that are trained, by the decile of their rollout's length (1: the shortest).

    Absent below ten rollouts.
    """
    trained = Counter[int]()
    for row in rows:
        for name, count in zip(row.completions, np.bincount(row.segment[row.places]), strict=False):
            trained[name] += int(count)
    items = [[(item.id, len(item.sampled)) for item in member.completions] for g in groups for member in g.rollouts]
    pairs = [(sum(size for _, size in own), sum(trained[name] for name, _ in own)) for own in items]
    if len(pairs) < DECILES:
        return {}
    parts = np.array_split(np.array(sorted(pairs, key=lambda pair: pair[0])), DECILES)
    shares = {str(n): float(part[:, 1].sum() / part[:, 0].sum()) for n, part in enumerate(parts, 1) if part[:, 0].any()}
    return {"survival_by_length": shares}


def sizes(facts: Facts, setting: Setting, completions: Mapping[int, Completion]) -> dict[str, Any]:
    """What all ranks computed by trees, and what the same tokens would have been without."""
    computed = sum((merged(micro) for rank in facts.micros for micro in rank), Work())
    rows = [row for rank in facts.micros for micro in rank for row in micro]
    if not computed.tokens:
        return {"computed_tokens": 0, "flat_tokens": 0}
    flat = separate([row.inputs for row in rows], sum(len(row.places) for row in rows))
    alone = [completions[name] for row in rows for name in row.completions]
    calls = separate([item.prompt_length + len(item.sampled) - 1 for item in alone], flat.asked)
    cost = flops(setting.shape, computed)
    seconds = facts.seconds.get("train", 0.0)
    said: dict[str, Any] = {
        "computed_tokens": computed.tokens,
        "flat_tokens": flat.tokens,
        "speedup_tokens": flat.tokens / computed.tokens,
        "speedup_flops": flops(setting.shape, flat) / cost,
        "flops": cost,
    }
    if alone:
        said |= {"call_tokens": calls.tokens, "speedup_calls_flops": flops(setting.shape, calls) / cost}
    if seconds:
        said["tokens_per_second"] = computed.tokens / seconds
        if setting.peak is not None:
            said["mfu"] = cost / seconds / setting.peak
    return said


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.float32), *arrays])


def line(version: Version, metrics: dict[str, Any]) -> str:
    """One step, for the terminal."""
    seconds = " ".join(f"{name} {value:.2f}s" for name, value in metrics["seconds"].items())
    drafts = f"draft {metrics['mtp_length']:.2f}  " if "mtp_length" in metrics else ""
    reward = f"{metrics['reward_mean']:.3f}" if "reward_mean" in metrics else "of no rollout"
    excluded = "".join(f"  ({count} not trained: {why})" for why, count in metrics["excluded_tokens"].items())
    return (
        f"step {version.step} {version.name}  reward {reward}  "
        f"groups {metrics['groups']} ({metrics['dropped_groups']} dropped)  tokens {metrics['trained_tokens']}"
        f"{excluded}  loss {metrics['loss']:.4f}  grad {metrics['grad_norm']:.3f}  "
        f"clipped {metrics.get('clip_fraction', 0):.2%}  stale {metrics['staleness_mean']:.1f}  {drafts}{seconds}"
    )
