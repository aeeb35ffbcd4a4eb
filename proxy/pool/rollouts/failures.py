"""Why a rollout has no verdict, or one that needs a remark: the whole list, and when failures stop a run.

A failure is data: it stands in the rollout's row. What is done about it:

- `retry`: the rollout runs again in place (same slot, new attempt), and is masked when the tries are used up.
- `mask`: the rollout has no reward, which is never 0, and is left out of its group's statistics.
- `filter`: the whole group is dropped, since what befell one member may have weighed on the others, and a new one of
  the same task is opened at the end of the queue, up to REPLACED times.
- `policy`: the policy's own doing; the verifier's verdict counts.
- `fatal`: no rollout can succeed, so the run ends and the rollout stays open.

What breaks a sandbox once its agent has begun may be the agent's own doing (it filled the disk, it ended what keeps its
container up), and nothing tells for certain. So it is never tried again, which would give an agent that breaks things a
second draw: it is masked (`verifier`) or filtered (`tool_flake`). Neither teaches the policy anything.

A group that was filtered, or that is left with too few rewards, is lost. `alarming` looks at how many are: a run whose
environment loses every second group would train on what is left, which is noise chosen by the failures. Following
ROLL (arXiv 2510.11345), with a sliding window per domain in place of counts over the whole run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Treatment = Literal["retry", "mask", "filter", "policy", "fatal"]
REPLACED = 2
"""How often a group that was filtered is replaced."""


@dataclass(frozen=True)
class Failure:
    """One kind of failure and what is done about it."""

    kind: str
    treatment: Treatment
    text: str


FAILURES: dict[str, Failure] = {
    failure.kind: failure
    for failure in (
        Failure("sandbox_start", "retry", "the sandbox or the task's set-up did not come up"),
        Failure("image", "mask", "the task's image cannot be built, or holds no agent; it would fail again"),
        Failure("engine", "retry", "the engine did not answer or broke off"),
        Failure("proxy", "retry", "the proxy could not be reached or could not record"),
        Failure("harness", "retry", "the harness itself failed: a full disk, or a bug"),
        Failure("interrupted", "retry", "the harness ended while the attempt ran"),
        Failure("agent_crash", "retry", "the agent ended without one completed model call"),
        Failure("agent_missing", "fatal", "the agent's binary is not installed"),
        Failure("agent_budget", "policy", "the agent used up its time, turns or tokens; the verdict is the verifier's"),
        Failure("agent_memory", "policy", "the agent outgrew its memory limit; the verdict is the verifier's"),
        Failure("tool_flake", "filter", "the sandbox failed under the agent's tools"),
        Failure("hung", "filter", "nothing happened for too long, no model call and no output, so it was ended"),
        Failure("verifier", "mask", "the verifier gave no verdict, also when asked again, so the reward is missing"),
        Failure("redundant", "mask", "enough others of its group had finished, so it was called off"),
        Failure("filtered", "mask", "its group was dropped for another member's failure, so it was called off"),
    )
}


def treatment(kind: str) -> Treatment:
    """What is done about a failure of this kind."""
    return FAILURES[kind].treatment


def enough_valid(valid: int, size: int) -> bool:
    """Whether a group of `size` teaches something with `valid` verdicts: more than half (GLM-5, arXiv 2602.15763, 4.1).

    A group with fewer is lost.
    """
    return 2 * valid > size


@dataclass(frozen=True, kw_only=True)
class LostGroupCap:
    """How many groups may be lost."""

    window: int = 512
    """The newest finished groups of a domain that are looked at."""
    alarm: float = 0.2
    stop: float = 0.5
    fewest: int = 20
    """A window that is not full counts as this many groups, so that the first failures of a run stop nothing."""


CAP = LostGroupCap()


def alarming(lost: Sequence[bool], cap: LostGroupCap = CAP) -> Literal["", "alarm", "stop"]:
    """What the finished groups of a domain call for, oldest first: nothing, an alarm, or the end of the run."""
    newest = lost[-cap.window :]
    share = sum(newest) / max(len(newest), cap.fewest)
    if share > cap.stop:
        return "stop"
    return "alarm" if share >= cap.alarm else ""
