"""Rollouts that cheated, and what becomes of them. Masked ones are neither trained nor part of group statistics.

Who says so is no matter of the pool (harness/integrity).
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import func

from proxy.pool.schema import rollouts
from proxy.pool.untrained import Untrained, UntrainedReason

TELL, MASK, ZERO = "tell", "mask", "zero"
MASKED = func.coalesce(rollouts.c.hacked, "") == MASK
"""Whether the rollout of a query's row is masked."""


def masked_as_hacked(hacked: str | None, integrity: Mapping[str, Any] | None) -> Untrained | None:
    """Return why a rollout with these columns is not trained; None: its integrity is no reason."""
    if hacked != MASK:
        return None
    return Untrained(UntrainedReason.HACKED, ", ".join((integrity or {}).get("by", ())))


def without_turns(parts: Mapping[str, float]) -> dict[str, float]:
    """Return a zeroed reward's parts without those of single turns, which would still be trained."""
    return {name: value for name, value in parts.items() if not name.startswith("turn:")}


def zeroed(integrity: Mapping[str, Any], reward: float) -> float:
    """Return the reward of a zeroed rollout that earned this: a zero above what it earned would be a prize."""
    return min(float(integrity["zero"]), reward)
