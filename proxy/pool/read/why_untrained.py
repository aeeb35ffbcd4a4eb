"""Why a call was not trained, or would not be, from its row and those above it.

Left out: what a train step decides about the tokens of a group that it took (docs/training.md).
"""

from dataclasses import dataclass

from proxy.pool.completions.labels import SIDE
from proxy.pool.rollouts.failures import why_untrained as why_failed
from proxy.pool.untrained import Untrained, UntrainedReason


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What is known of a call's attempt, rollout and group."""

    retried: bool
    """Another attempt gave the rollout its outcome, or will."""
    without_reward: bool
    """The rollout has ended without a reward."""
    failure: str | None
    hacked: Untrained | None
    """It cheated, and is masked."""
    set_aside: str | None
    """Why the user's function drops the rollout; None: it does not."""
    group: Untrained | None
    """Why its group is not trained."""


def group_untrained(purpose: str, reason: str | None, detail: str | None) -> Untrained | None:
    """Return why a group with these columns is not trained. `purpose`: its own, or that of its run."""
    if purpose == "eval":
        return Untrained(UntrainedReason.HELD_OUT)
    return Untrained.from_columns(reason, detail)


def why_untrained(own: Untrained | None, label: str | None, around: Surroundings) -> Untrained | None:
    """Return the first reason that holds: of the call, of its attempt, of its rollout, of its group. None: no reason.

    `own`: the reason that was recorded with the call.
    """
    if own is not None:
        return own
    if label == SIDE:
        return Untrained(UntrainedReason.LABEL, SIDE)
    if around.retried:
        return Untrained(UntrainedReason.RETRIED)
    if around.without_reward:
        return why_failed(around.failure) if around.failure else Untrained(UntrainedReason.NO_REWARD)
    if around.hacked is not None:
        return around.hacked
    if around.set_aside is not None:
        return Untrained(UntrainedReason.FUNCTION, around.set_aside)
    return around.group
