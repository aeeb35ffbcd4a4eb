"""The file that `slime --load-debug-rollout-data` reads: slime/observability/rollout_data_utils.py in its source."""

from pathlib import Path
from typing import Any

from proxy.pool.completions.records import REPETITION
from proxy.pool.export.sequences import Batch, TokenSequence, origin, torch_module
from proxy.pool.read.records import RolloutRecord

STATUS = {"length": "truncated", REPETITION: "truncated", "abort": "aborted", "error": "failed"}
"""Finish reason of the last call -> `Sample.Status`; others: completed."""


def write_slime(batch: Batch, step: int, file: Path) -> None:
    """Write a batch. slime counts its rollout steps from 0."""
    samples = [_sample(index, rollout, part) for index, (rollout, part) in enumerate(batch)]
    with file.open("wb") as output:  # by itself torch raises another error where the directory is missing
        torch_module().save({"rollout_id": step - 1, "samples": samples}, output)


def _sample(index: int, rollout: RolloutRecord, part: TokenSequence) -> dict[str, Any]:
    """Return the fields of slime's `Sample` (slime/utils/types.py) that are known."""
    return {
        "group_index": rollout.group,
        "index": index,
        "rollout_id": rollout.rollout,
        "tokens": part.tokens.tolist(),
        "response_length": len(part.tokens) - part.prompt_length,
        "reward": rollout.reward,
        "loss_mask": part.mask[part.prompt_length :].tolist(),
        "rollout_log_probs": part.logprobs[part.prompt_length :].tolist(),
        "weight_versions": list(part.versions),
        "status": STATUS.get(part.finish_reason, "completed"),
        "metadata": origin(rollout),
    }
