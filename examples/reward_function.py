"""A reward function: `harness run ... --reward examples.reward_function:brief`, or `harness rescore`."""

from typing import Any


def brief(task: dict[str, Any], verdict: dict[str, Any], rollout: dict[str, Any]) -> dict[str, float] | None:
    """Take a tenth of a success away for each turn after the fifth, and 0.05 from each turn with a failed call."""
    if verdict["reward"] is None:
        return None
    turns = rollout["turns"]
    failed = {f"turn:{turn['turn']}": -0.05 for turn in turns if any(call["failed"] for call in turn["calls"])}
    late = 0.1 * max(0, len(turns) - 5) if verdict["reward"] > 0 else 0.0
    return {"reward": max(0.0, verdict["reward"] - late), **failed}
