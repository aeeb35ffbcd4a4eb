"""Runs trials of a task without an agent: its oracle solution, or nothing at all, verified like an agent's work."""

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
    """The result of one trial."""

    task: str
    """The task's id and a digest of its content."""
    kind: Kind
    number: int
    variation: str = ""
    """The variation of the environment as `kind=value`; empty for none."""
    reward: float | None
    failure: Literal["environment", "verifier"] | None = None
    """What failed, if there is no reward."""
    detail: str = ""
    """Detail of the failure, or the end of the output of a solution that did not exit with 0."""
    seconds: float


@dataclass(frozen=True)
class TrialSpec:
    """A trial to run."""

    task: Task
    key: str
    kind: Kind
    number: int
    variation: Variation | None = None

    @property
    def name(self) -> tuple[str, Kind, int, str]:
        return self.key, self.kind, self.number, self.variation.name if self.variation else ""


async def run_trial(sandboxes: Sandboxes, spec: TrialSpec) -> Trial:
    """Run one trial in a sandbox of its own. Failures are part of the result and not raised."""
    began = time.monotonic()
    reward: float | None = None
    failure: Literal["environment", "verifier"] | None = None
    try:
        verdict, detail = await _judged(sandboxes, spec)
        reward = verdict.reward
    except AttemptFailed as failed:
        failure, detail = "verifier" if failed.kind == "verifier" else "environment", failed.detail
    except SandboxError as error:
        failure, detail = "environment", str(error)
    seconds = time.monotonic() - began
    key, kind, number, variation = spec.name
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


async def _judged(sandboxes: Sandboxes, spec: TrialSpec) -> tuple[Verdict, str]:
    """Judge all parts. Returns the verdict, and remarks on solutions that did not exit with 0."""
    task, variations = spec.task, [spec.variation] if spec.variation else []
    if task.network == "model" and sandboxes.kind != "process":  # there is no model in a trial
        task = msgspec.structs.replace(task, network="none")
    env: dict[str, str] = {}
    judged: list[tuple[str, Verdict]] = []
    remarks: list[str] = []
    sandbox = await sandboxes.start(spec_of(task))
    try:
        for part in parts_of(task):
            await set_up(sandbox, part.task)
            if variations:
                _, env = await apply(sandbox, part.task, variations)
                variations = []
            snapshot = await take_snapshot(sandbox, part.task, sandboxes)
            remarks += [await _solve(sandbox, part, env)] if spec.kind == "oracle" else []
            async with verifier_sandbox(
                sandboxes, sandbox, part.task, snapshot, before=part.before, more=part.more
            ) as (room, _):
                verdict = await verify(room, part.task)
            judged.append((part.name, verdict))
            if below(verdict, part.min_reward):
                break
    finally:
        await sandbox.stop()
    return (joined(judged, task.steps_reward) if task.steps else verdict), "; ".join(filter(None, remarks))


async def _solve(sandbox: Sandbox, part: TaskPart, env: dict[str, str]) -> str:
    """Run the oracle as the agent would be run. Returns a remark when it does not exit with 0, else nothing."""
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
