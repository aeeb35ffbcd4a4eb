"""Trials of a task without any agent: its oracle solution, or nothing at all, judged as an agent's work would be."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from harness.environment.augment import Variation, apply
from harness.environment.snapshot import set_up, spec_of, take_snapshot
from harness.failure import AttemptFailed
from harness.tasks import Task, TaskPart, parts_of
from harness.verdict.isolation import verifier_sandbox
from harness.verdict.rewards import Verdict, below, joined
from harness.verdict.verifier import verify
from sandboxes.base import Sandbox, SandboxError, Sandboxes

Kind = Literal["oracle", "no-op"]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """How one trial went."""

    task: str
    """The task's id and a digest of all that it says."""
    kind: Kind
    number: int
    variation: str = ""
    """What the environment had otherwise, as `kind=value`."""
    reward: float | None
    failure: Literal["environment", "verifier"] | None = None
    """What broke, so that there is no reward."""
    detail: str = ""
    """Of the failure; or of a solution that did not exit with 0, the end of what it printed."""
    seconds: float


@dataclass(frozen=True)
class TrialSpec:
    """A trial to be run."""

    task: Task
    key: str
    kind: Kind
    number: int
    variation: Variation | None = None

    @property
    def name(self) -> tuple[str, Kind, int, str]:
        return self.key, self.kind, self.number, self.variation.name if self.variation else ""


async def run_trial(sandboxes: Sandboxes, wanted: TrialSpec) -> Trial:
    """One trial in a sandbox of its own. What goes wrong is part of the result."""
    began = time.monotonic()
    reward: float | None = None
    failure: Literal["environment", "verifier"] | None = None
    try:
        verdict, detail = await _judged(sandboxes, wanted)
        reward = verdict.reward
    except AttemptFailed as failed:
        failure, detail = "verifier" if failed.kind == "verifier" else "environment", failed.detail
    except SandboxError as error:
        failure, detail = "environment", str(error)
    seconds = time.monotonic() - began
    key, kind, number, variation = wanted.name
    return Trial(
        task=key,
        kind=kind,
        number=number,
        variation=variation,
        reward=reward,
        failure=failure,
        detail=detail[-2000:],
        seconds=seconds,
    )


async def _judged(sandboxes: Sandboxes, wanted: TrialSpec) -> tuple[Verdict, str]:
    """The verdict on all parts, and what is to be said about the solutions."""
    task, variations = wanted.task, [wanted.variation] if wanted.variation else []
    if task.network == "model" and sandboxes.kind != "process":  # there is no model in a trial
        task = msgspec.structs.replace(task, network="none")
    env: dict[str, str] = {}
    judged: list[tuple[str, Verdict]] = []
    said: list[str] = []
    sandbox = await sandboxes.start(spec_of(task))
    try:
        for part in parts_of(task):
            await set_up(sandbox, part.task)
            if variations:
                _, env = await apply(sandbox, part.task, variations)
                variations = []
            snapshot = await take_snapshot(sandbox, part.task, sandboxes)
            said += [await _solve(sandbox, part, env)] if wanted.kind == "oracle" else []
            async with verifier_sandbox(sandboxes, sandbox, part.task, snapshot, part.more) as (room, _):
                verdict = await verify(room, part.task)
            judged.append((part.name, verdict))
            if below(verdict, part.min_reward):
                break
    finally:
        await sandbox.stop()
    return (joined(judged, task.steps_reward) if task.steps else verdict), "; ".join(filter(None, said))


async def _solve(sandbox: Sandbox, part: TaskPart, env: dict[str, str]) -> str:
    """Run the oracle where and as the agent would work; what is to be said when it does not exit with 0."""
    task, solution = part.task, part.task.solution
    if solution is None:
        raise AttemptFailed("harness", f"step {part.name} has no solution")
    for path, source in solution.directories.items():
        await sandbox.put(Path(source), path)
    result = await sandbox.run(solution.command, task.command_limits(task.timeout), task.env | env | solution.env)
    if result.ended == "exit" and not result.exit_code:
        return ""
    how = f"exit code {result.exit_code}" if result.ended == "exit" else f"its {result.ended} limit"
    return f"the solution ended by {how}: {result.output[-500:].strip()}"
