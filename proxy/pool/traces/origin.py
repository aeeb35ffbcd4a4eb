"""Where a branch comes from, for the formats' own fields. What is not known is None."""

from typing import Any

from proxy.pool.read.records import RolloutRecord
from proxy.pool.traces.branches import PromptBranch

FIELDS = (
    "run", "task", "domain", "group", "step", "rollout", "member", "attempt", "agent", "final", "reward",
    "reward_parts", "failure", "weight", "hacked",
)  # fmt: skip


def of_rollout(rollout: RolloutRecord) -> dict[str, Any]:
    """Return place and outcome of a rollout."""
    return {name: getattr(rollout, name) for name in FIELDS}


def of_branch(branch: PromptBranch) -> dict[str, Any]:
    """Return place and outcome of a branch's rollout, and what the branch is.

    `tools_known` is false where the prompt writes its tools in a form that is not read.
    """
    return of_rollout(branch.rollout) | {
        "branch": branch.number,
        "label": branch.label,
        "forked_from": branch.forked_from,
        "tools_known": branch.tools is not None,
    }
