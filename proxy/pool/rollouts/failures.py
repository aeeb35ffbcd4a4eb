"""Every kind of failure of a rollout, its treatment, and when failures stop a run.

A failure is data: the row of the rollout holds it. The treatments:

- `retry`: run the rollout again (same slot, new attempt); mask it when its attempts are used up.
- `mask`: the rollout has no reward (which is not 0) and is left out of the statistics of its group.
- `filter`: drop the whole group, because the same fault may have affected the other members, and open a new group of
  the same task at the end of the queue, up to REPLACED times.
- `policy`: the policy caused it, so the verdict of the verifier counts.
- `fatal`: no rollout can succeed; the run ends and the rollout stays open.

When a sandbox breaks after its agent has started, the agent may have caused it (a full disk, a killed init process),
and this cannot be told for certain. Such a rollout is never retried, because a retry would reward an agent that breaks
things with a second try. It is masked (`verifier`) or its group is filtered (`tool_flake`); the policy learns from
neither.

A group is lost when it is filtered or keeps too few rewards (`enough_valid`). `alarming` watches the share of lost
groups: a run that loses every second group would train on what the failures leave, which is a biased sample. This
follows ROLL (arXiv 2510.11345), with a sliding window per domain instead of counts over the whole run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.pool.untrained import Untrained, UntrainedReason

Treatment = Literal["retry", "mask", "filter", "policy", "fatal"]
DIFFERED = "replay_differed"
"""The failure of rollouts that left the recorded attempt which they begin with (proxy/pool/rollouts/starts.py)."""
REPLACED = 2
"""Maximum replacements of a filtered group."""


@dataclass(frozen=True)
class Failure:
    """One kind of failure and its treatment."""

    kind: str
    treatment: Treatment
    text: str


FAILURES: dict[str, Failure] = {
    failure.kind: failure
    for failure in (
        Failure("sandbox_start", "retry", "the sandbox did not start, or the set-up of the task failed"),
        Failure("outage", "retry", "no engine was up, or no sandboxes; runs again, ten times not counted as a try"),
        Failure("image", "mask", "the task's image cannot be built or cannot run the agent; a retry would fail again"),
        Failure("engine", "retry", "the engine did not answer, or ended the answer early"),
        Failure("proxy", "retry", "the proxy was unreachable or could not record the call"),
        Failure("harness", "retry", "the harness failed: a full disk, or a bug"),
        Failure("interrupted", "retry", "the harness ended while the attempt ran"),
        Failure("agent_crash", "retry", "the agent ended before any model call completed"),
        Failure("agent_missing", "fatal", "the agent's binary is not installed"),
        Failure("agent_budget", "policy", "the agent used up its time or tokens; the verifier decides"),
        Failure("agent_turns", "policy", "the agent used up its turns; the verifier decides"),
        Failure("agent_memory", "policy", "the agent exceeded its memory limit; the verifier decides"),
        Failure("tool_flake", "filter", "the sandbox failed while the agent used its tools"),
        Failure("hung", "filter", "the agent was stopped after too long without a model call and without output"),
        Failure(DIFFERED, "mask", "a request differed from the recorded attempt that the rollout begins with"),
        Failure("verifier", "mask", "the verifier gave no verdict in two tries, so the reward is missing"),
        Failure("reward", "mask", "the run's reward function or judges gave no reward"),
        Failure("spoiled", "mask", "the verifier gives no verdict on the agent's work, but one where no agent was"),
        Failure("redundant", "mask", "enough others of its group had finished, so it was cancelled"),
        Failure("called_off", "mask", "the monitor dropped its task, so it was cancelled"),
        Failure("filtered", "mask", "its group was dropped for another member's failure, so it was cancelled"),
    )
}


def treatment(kind: str) -> Treatment:
    """Return the treatment of a kind of failure."""
    return FAILURES[kind].treatment


def why_untrained(kind: str) -> Untrained:
    """Return why a rollout without a reward that failed like this is not trained."""
    if kind == DIFFERED:
        return Untrained(UntrainedReason.REPLAY_DIFFERED)
    return Untrained(UntrainedReason.ROLLOUT_FAILED, kind)


def enough_valid(valid: int, size: int) -> bool:
    """Return whether a group of `size` rollouts may be trained with `valid` rewards: more than half must be valid.

    GLM-5, arXiv 2602.15763 section 4.1. A group with fewer is lost.
    """
    return 2 * valid > size


@dataclass(frozen=True, kw_only=True)
class LostGroupCap:
    """Limits on the share of lost groups."""

    window: int = 512
    """Number of newest finished groups of a domain that are counted."""
    alarm: float = 0.2
    """The share from which on to warn."""
    stop: float = 0.5
    """Above this share, end the run."""
    fewest: int = 20
    """A window with fewer groups counts as this many, so that the first failures do not stop a run."""


CAP = LostGroupCap()
SPOILED_WINDOW = 64
"""Newest finished rollouts of a task among which the spoiled ones are counted."""
SPOILED_FEWEST = 3
"""The number from which on to warn, and again at each doubling: a policy may have learned to avoid verdicts."""


def alarming(lost: Sequence[bool], cap: LostGroupCap = CAP) -> Literal["", "alarm", "stop"]:
    """Assess the finished groups of a domain (oldest first; True: lost): "" (go on), "alarm" or "stop"."""
    newest = lost[-cap.window :]
    share = sum(newest) / max(len(newest), cap.fewest)
    if share > cap.stop:
        return "stop"
    return "alarm" if share >= cap.alarm else ""
