"""Functions between pool and batch: set `function = "examples.batch_function:unhurried"` in the section [batch]."""

from typing import Any


def unhurried(rollout: dict[str, Any]) -> float:
    """Drop rollouts that end in the middle of an answer, and count those of one call half."""
    calls = rollout["completions"]
    if calls[-1]["finish_reason"] in ("length", "repetition"):
        return 0.0
    return 0.5 if len(calls) == 1 else 1.0


def without_notes(rollout: dict[str, Any]) -> dict[str, Any]:
    """Train no notes that an agent took to shorten its context: the ablation of benchmarks/context.py."""
    return {"leave_out": [call["id"] for call in rollout["completions"] if call["label"] == "compaction"]}
