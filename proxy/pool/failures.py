"""Why a rollout has no verdict, or one that needs a remark: the whole list.

A failure is data: it stands in the rollout's row. `retry` runs the rollout again in place (same slot, new attempt),
and masks it when the tries are used up; `mask` leaves the rollout out of the group's statistics; `policy` is the
policy's own doing, so the verifier's verdict counts; `fatal` ends the run, since no rollout can succeed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """One kind of failure and what is done about it."""

    kind: str
    treatment: str  # retry | mask | policy | fatal
    text: str


FAILURES: dict[str, Failure] = {
    failure.kind: failure
    for failure in (
        Failure("sandbox_start", "retry", "the sandbox or the task's set-up did not come up"),
        Failure("proxy", "retry", "the proxy could not be reached or could not record"),
        Failure("engine", "retry", "the engine did not answer or broke off"),
        Failure("harness", "retry", "the harness itself failed: a full disk, or a bug"),
        Failure("interrupted", "retry", "the harness ended while the attempt ran"),
        Failure("agent_crash", "retry", "the agent ended without one completed model call"),
        Failure("agent_missing", "fatal", "the agent's binary is not installed"),
        Failure("agent_timeout", "policy", "the agent used up its time; the verdict is the verifier's"),
        Failure("agent_memory", "policy", "the agent outgrew its memory limit; the verdict is the verifier's"),
        Failure("verifier", "mask", "the verifier gave no verdict, so the reward is missing"),
    )
}


def treatment(kind: str) -> str:
    """What is done about a failure of this kind: retry, mask, policy or fatal."""
    return FAILURES[kind].treatment
