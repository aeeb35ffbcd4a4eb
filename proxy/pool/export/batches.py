"""Batches for other trainers (docs/pool.md): the sequences of finished rollouts with a reward, in one file.

A rollout without a reward, or without a token that may be trained, is left out and counted. A batch is made in memory.
Left out: routed experts, and texts, which neither trainer learns from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.export.sequences import Batch, sequences
from proxy.pool.export.slime import write_slime
from proxy.pool.export.verl import write_verl
from proxy.pool.files import replacing
from proxy.pool.read.pages import RolloutFilter
from proxy.pool.read.shown import shown

BATCH_WRITERS: dict[str, Callable[[Batch, int, Path], None]] = {"slime": write_slime, "verl": write_verl}
"""The formats. Each is given the train step of the batch, 1 where it has none."""


@dataclass(frozen=True)
class TrainingFile:
    """What was written."""

    samples: int
    rollouts: int
    left_out: int
    """Rollouts without a reward or without a token that may be trained."""


def write_batch(pool: Pool, which: RolloutFilter, kind: str, file: Path) -> TrainingFile:
    """Write the rollouts that pass as one batch. UserError when none can be trained, or the file cannot be written."""
    batch: Batch = []
    taken = left_out = 0
    with shown(pool, which, f"reading rollouts for {file.name}") as found:
        for rollout in found:
            parts = [] if rollout.reward is None else sequences(rollout)
            batch += [(rollout, part) for part in parts]
            taken, left_out = taken + bool(parts), left_out + (not parts)
    if not batch:
        raise UserError(f"none of the {left_out} rollouts has a reward and tokens that may be trained; choose others")
    try:
        with replacing(file) as partial:
            BATCH_WRITERS[kind](batch, which.first_step or 1, partial)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); name a file in a writable directory") from error
    return TrainingFile(len(batch), taken, left_out)
