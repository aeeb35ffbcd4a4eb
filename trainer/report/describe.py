"""The metrics of a step, as the pool stores them, and the line that the terminal shows.

docs/training.md defines each metric. Pure functions over what the step used. A metric that is not known is absent,
never 0 or a guess. Not here: where else metrics are written (trainer/report/exporters.py).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from proxy.pool.completions.records import Completion
from proxy.pool.training.steps import Version
from proxy.pool.training.windowed_fifo import LeasedGroup
from proxy.pool.untrained import to_metrics
from trainer.config.batch import TRAINED
from trainer.config.model_shape import ModelShape
from trainer.credit.scales import deviations
from trainer.data.assemble import TrainingBatch
from trainer.data.row import TrainingRow
from trainer.loss.policy_loss import read_sums
from trainer.monitor.rollouts import UNKNOWN, behaviour, lengths, rewarded
from trainer.policy import Update
from trainer.report.by_agent import by_agent, trained_by_completion
from trainer.report.flops import Workload, flops, merged, separate
from trainer.report.left_out import left_out_by_length
from trainer.report.tokens import TokenNotes

EXTREME = float(np.log(2))
DECILES = 10


@dataclass(frozen=True)
class StepFacts:
    """What a step used and what it computed."""

    step: int
    groups: Sequence[LeasedGroup]
    batch: TrainingBatch
    micros: Sequence[Sequence[Sequence[TrainingRow]]]
    """[data rank][micro-batch] -> rows."""
    update: Update
    notes: Mapping[int, TokenNotes]
    """What the loss gave the tokens of each computed row, by the row's id()."""
    gradient_shares: Mapping[str, float]
    """Metrics of the gradients of both signs; empty in steps that do not measure them."""
    seconds: dict[str, float]
    """Duration of each part of the step that has ended."""


@dataclass(frozen=True, kw_only=True)
class MetricsContext:
    """What the metrics need to know of the run."""

    shape: ModelShape
    labels: Sequence[str] = TRAINED
    peak: float | None = None
    """Peak FLOPs per second of all devices together; None where it is not known."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Name of every weight version of the run -> its step."""
    first_commands: Mapping[str, float] = field(default_factory=dict)
    """`command_counts` of the run's first step; empty in that step, and where it has none."""


def describe(facts: StepFacts, run: MetricsContext) -> dict[str, Any]:
    """Return the metrics of a step. Those of trained tokens are absent when nothing was trained."""
    completions = {item.id: item for item in sampled(facts.groups)}
    ages = {
        id(row): lags(row, completions, run.versions, facts.step - 1) for row in facts.batch.rows if row.completions
    }
    update = {
        "loss": facts.update.loss,
        "grad_norm": facts.update.grad_norm,
        "lr": facts.update.learning_rate,
        **facts.gradient_shares,
        "seconds": facts.seconds,
        "sequences": len(facts.batch.rows),
    }
    return (
        (read_sums(facts.update.sums) if facts.update.sums else {})
        | updates(facts.update)
        | (facts.update.drafts.metrics() if facts.update.drafts else {})
        | update
        | facts.update.routing
        | rewards(facts.groups, facts.batch)
        | mix(facts.groups, facts.batch.rows)
        | by_agent(facts.groups, facts.batch.rows)
        | advantages(facts.batch.rows)
        | lengths(facts.groups, run.labels)
        | staleness(facts.groups, ages.values())
        | mismatch(facts.batch.rows, facts.notes, ages)
        | survival(completions.values(), facts.batch)
        | behaviour(facts.groups, run.first_commands)
        | survival_by_length(facts.groups, facts.batch.rows)
        | left_out_by_length(fate.to_pool() for fate in facts.batch.fates)
        | sizes(facts, run, completions)
    )


def updates(update: Update) -> dict[str, Any]:
    """Describe the last of a step's updates, where it took several: by then the policy has left the old one."""
    if not update.later:
        return {}
    last = update.later[-1].sums
    names = ("ratio_mean", "ratio_max", "clip_fraction", "mask_fraction")
    sums = {} if last is None else read_sums(last)
    return {"updates": len(update.later)} | {f"last_{name}": sums[name] for name in names if name in sums}


def sampled(groups: Iterable[LeasedGroup]) -> list[Completion]:
    """Return every completion of these groups."""
    return [item for group in groups for member in group.rollouts for item in member.completions]


def rewards(groups: Sequence[LeasedGroup], batch: TrainingBatch) -> dict[str, Any]:
    """Summarise the rewards that the verifiers gave, and the groups; members without a verdict have no reward."""
    by_domain: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        by_domain[str(group.task.get("domain", UNKNOWN))] += [reward for reward, _ in rewarded(group)]
    mean: dict[str, Any] = {"reward_mean": fmean(batch.rewards)} if batch.rewards else {}  # that of none is not 0
    if batch.scales is not None:
        mean["return_deviation"] = deviations(batch.scales)
    return mean | {
        "reward_by_domain": {domain: fmean(values) for domain, values in sorted(by_domain.items()) if values},
        "rollouts": sum(len(group.rollouts) for group in groups),
        "valid_rollouts": len(batch.rewards),
        "groups": len(groups),
        "dropped_groups": batch.dropped_groups,
        "equal_groups": batch.equal_groups,
    }


def mix(groups: Sequence[LeasedGroup], rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """Count the step's groups, and the tokens that are trained, by the domain of their task."""
    counts, tokens, trained = Counter[str](), Counter[str](), trained_by_completion(rows)
    for group in groups:
        domain = str(group.task.get("domain", UNKNOWN))
        counts[domain] += 1
        tokens[domain] += sum(trained[item.id] for item in sampled([group]))
    return {"groups_by_domain": dict(sorted(counts.items())), "tokens_by_domain": dict(sorted(tokens.items()))}


def advantages(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """Summarise the advantages of the trained tokens, as the loss uses them."""
    values = _joined(row.advantage[row.places] for row in rows)
    if not len(values):
        return {}
    return {
        "advantage_mean": float(values.mean(dtype=np.float64)),
        "advantage_std": float(values.std(dtype=np.float64)),
        "advantage_min": float(values.min()),
        "advantage_max": float(values.max()),
    }


def lags(
    row: TrainingRow, completions: Mapping[int, Completion], versions: Mapping[str, int], current: int
) -> np.ndarray:
    """Return how old each trained token is: [trained tokens], -1 where the version that sampled it is not known.

    The age is the number of published steps between the weights that sampled the token and those that it updates.
    """
    ages = np.full(len(row.tokens), -1, dtype=np.int64)
    for completion_id in row.completions:
        item = completions[completion_id]
        for span in item.versions:
            if span.version in versions:
                place = slice(item.prompt_length + span.start, item.prompt_length + span.end)
                ages[place] = current - versions[span.version]
    return ages[row.places]


def staleness(groups: Sequence[LeasedGroup], ages: Iterable[np.ndarray]) -> dict[str, Any]:
    """Summarise the ages of groups (that of their oldest token) and of trained tokens, as histograms age -> count."""
    by_group = [group.staleness for group in groups]
    tokens = _joined(ages).astype(np.int64)
    known = tokens[tokens >= 0]
    metrics: dict[str, Any] = {
        "staleness_mean": sum(by_group) / len(by_group),
        "staleness_max": max(by_group),
        "staleness_groups": _histogram(np.array(by_group)),
        "staleness_tokens": _histogram(tokens),
    }
    return metrics | ({"staleness_tokens_mean": float(known.mean())} if len(known) else {})


def _histogram(ages: np.ndarray) -> dict[str, int]:
    counts = Counter(ages.tolist())
    return {UNKNOWN if age < 0 else str(age): counts[age] for age in sorted(counts)}


def mismatch(
    rows: Sequence[TrainingRow], notes: Mapping[int, TokenNotes], ages: Mapping[int, np.ndarray]
) -> dict[str, float]:
    """Compare the trainer's logprobs with the engine's, per trained token.

    `kl_fresh` takes the tokens that the current weights sampled, so it holds no staleness.
    """
    known = [row for row in rows if id(row) in notes]
    logs = _joined(notes[id(row)].logp - row.rollout_logp[row.places] for row in known).astype(np.float64)
    if not len(logs):
        return {}
    fresh = _joined(ages.get(id(row), np.full(len(row.places), -1)) == 0 for row in known).astype(bool)
    metrics = {"extreme_tokens": float((np.abs(logs) > EXTREME).mean()), "logprob_gap_mean": float(np.abs(logs).mean())}
    if fresh.any():
        clamped = logs[fresh].clip(-20, 20)
        metrics["kl_fresh"] = float((np.exp(clamped) - 1 - clamped).mean())
    return metrics


def survival(completions: Iterable[Completion], batch: TrainingBatch) -> dict[str, Any]:
    """Account for every sampled token of the step. What was replayed was sampled where it was recorded."""
    answers = list(completions)
    replayed = sum(len(item.sampled) for item in answers if item.replayed)
    total = sum(len(item.sampled) for item in answers) - replayed
    return {
        "sampled_tokens": total,
        "replayed_tokens": replayed,
        "trained_tokens": batch.tokens,
        "excluded_tokens": to_metrics(batch.excluded),
        "masked_tokens": to_metrics(batch.masked),
        "unplaced_rewards": batch.unplaced_rewards,
        "unaccounted_tokens": total - batch.tokens - sum(batch.excluded.values()),
    }


def survival_by_length(groups: Sequence[LeasedGroup], rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """Return the trained share of the sampled tokens, by the decile of their rollout's length (1: the shortest).

    Absent below ten rollouts.
    """
    trained = trained_by_completion(rows)
    members = [member for group in groups for member in group.rollouts]
    pairs = [
        (
            sum(len(item.sampled) for item in member.completions if not item.replayed),
            sum(trained[item.id] for item in member.completions),
        )
        for member in members
    ]
    if len(pairs) < DECILES:
        return {}
    parts = np.array_split(np.array(sorted(pairs, key=lambda pair: pair[0])), DECILES)
    shares = {str(n): float(part[:, 1].sum() / part[:, 0].sum()) for n, part in enumerate(parts, 1) if part[:, 0].any()}
    return {"survival_by_length": shares}


def sizes(facts: StepFacts, run: MetricsContext, completions: Mapping[int, Completion]) -> dict[str, Any]:
    """Count what all ranks computed in prefix trees, and what the same tokens would have cost without them."""
    computed = sum((merged(micro) for rank in facts.micros for micro in rank), Workload())
    rows = [row for rank in facts.micros for micro in rank for row in micro]
    if not computed.tokens:
        return {"computed_tokens": 0, "flat_tokens": 0}
    flat = separate([row.inputs for row in rows], sum(len(row.places) for row in rows))
    alone = [completions[completion_id] for row in rows if not row.imitated for completion_id in row.completions]
    lengths = [item.prompt_length + len(item.sampled) - 1 for item in alone]
    calls = separate([*lengths, *(row.inputs for row in rows if row.imitated)], flat.logprobs)
    cost = flops(run.shape, computed)
    passes = max(1, len(facts.update.later) // len(facts.batch.minibatches))
    seconds = facts.seconds.get("train", 0.0)
    metrics: dict[str, Any] = {
        "computed_tokens": computed.tokens,
        "flat_tokens": flat.tokens,
        "speedup_tokens": flat.tokens / computed.tokens,
        "speedup_flops": flops(run.shape, flat) / cost,
        "flops": cost * passes,
    }
    if alone:
        metrics |= {"call_tokens": calls.tokens, "speedup_calls_flops": flops(run.shape, calls) / cost}
    if seconds:
        metrics["tokens_per_second"] = computed.tokens * passes / seconds
        if run.peak is not None:
            metrics["mfu"] = cost * passes / seconds / run.peak
    return metrics


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.float32), *arrays])


def line(version: Version, metrics: dict[str, Any]) -> str:
    """Return the terminal's line about a step."""
    seconds = " ".join(f"{name} {value:.2f}s" for name, value in metrics["seconds"].items())
    drafts = f"draft {metrics['mtp_length']:.2f}  " if "mtp_length" in metrics else ""
    reward = f"{metrics['reward_mean']:.3f}" if "reward_mean" in metrics else "of no rollout"
    excluded = "".join(f"  ({count} not trained: {why})" for why, count in metrics["excluded_tokens"].items())
    excluded += "".join(f"  ({count} masked: {why})" for why, count in metrics.get("masked_tokens", {}).items())
    unused = "".join(f"  ({count} unused: {why})" for why, count in metrics.get("unused_groups", {}).items())
    return (
        f"step {version.step} {version.name}  reward {reward}  "
        f"groups {metrics['groups']} ({metrics['dropped_groups']} dropped){unused}  tokens {metrics['trained_tokens']}"
        f"{excluded}  loss {metrics['loss']:.4f}  grad {metrics['grad_norm']:.3f}  "
        f"clipped {metrics.get('clip_fraction', 0):.2%}  stale {metrics['staleness_mean']:.1f}  {drafts}{seconds}"
    )
