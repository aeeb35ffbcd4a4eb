"""The metrics of a step, as the pool keeps them, and the line that the terminal shows.

Left out: where else they are written; what a batch is made of (trainer/batch.py).
"""

import time
from collections.abc import Sequence
from typing import Any

from proxy.pool.schedule import LeasedGroup
from proxy.pool.steps import Version
from trainer.batch import Batch
from trainer.loss import read_sums
from trainer.policy import Update
from trainer.rows import Row
from trainer.tree import distinct


def describe(update: Update, batch: Batch, groups: list[LeasedGroup]) -> dict[str, Any]:
    """The metrics of a step; those of the policy's tokens are absent when nothing could be learned."""
    staleness = [group.staleness for group in groups]
    learned = read_sums(update.sums) if update.sums else {}
    return learned | {
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "reward_mean": sum(batch.rewards) / max(1, len(batch.rewards)),
        "rollouts": sum(len(group.rollouts) for group in groups),
        "valid_rollouts": len(batch.rewards),
        "groups": len(groups),
        "dropped_groups": batch.dropped_groups,
        "sequences": len(batch.rows),
        "trained_tokens": batch.tokens,
        "excluded_tokens": dict(batch.excluded),
        "masked_tokens": dict(batch.masked),
        "unplaced_rewards": batch.unplaced_rewards,
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
    }


def sizes(micros: Sequence[Sequence[Sequence[Row]]]) -> dict[str, int]:
    """What all ranks compute, in tokens: by trees, and what the same rows would be one by one."""
    return {
        "computed_tokens": sum(distinct(micro) for rank in micros for micro in rank),
        "flat_tokens": sum(row.inputs for rank in micros for micro in rank for row in micro),
    }


class Clock:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 4)
        self._last = now


def line(version: Version, metrics: dict[str, Any]) -> str:
    """One step, for the terminal."""
    seconds = " ".join(f"{name} {value:.2f}s" for name, value in metrics["seconds"].items())
    return (
        f"step {version.step} {version.name}  reward {metrics['reward_mean']:.3f}  "
        f"groups {metrics['groups']} ({metrics['dropped_groups']} equal)  tokens {metrics['trained_tokens']}  "
        f"loss {metrics['loss']:.4f}  grad {metrics['grad_norm']:.3f}  clipped {metrics.get('clip_fraction', 0):.2%}  "
        f"stale {metrics['staleness_mean']:.1f}  {seconds}"
    )
