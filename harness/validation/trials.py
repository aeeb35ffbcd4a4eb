"""Runs trials of a task without an agent, verified like an agent's work.

oracle  the task's solution
no-op   nothing
hollow  the task's solution, whose code is then replaced by code that does no work (hollow.py)
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from harness.environment.augment import Variation
from harness.environment.snapshot import set_up, spec_of, take_snapshot
from harness.environment.varied import Applied, vary
from harness.failure import AttemptFailed
from harness.tasks import Task, TaskPart, parts_of
from harness.validation.hollow import hollow_out
from harness.verdict.isolation import verifier_sandbox
from harness.verdict.rewards import Verdict, below, joined
from harness.verdict.verifier import verify
from proxy.pool.errors import PoolError, UserError
from sandboxes.base import Sandbox, SandboxError, Sandboxes

Kind = Literal["oracle", "no-op", "hollow"]
Where = Literal["fresh", "shared"]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one trial."""

    task: str
    """The task's id and a digest of its content."""
    kind: Kind
    number: int
    variation: str = ""
    """The variation of the environment as `kind=value`; empty for none."""
    where: str = ""
    """Where it was verified: fresh | shared; empty: where the task says."""
    reward: float | None
    failure: Literal["environment", "verifier"] | None = None
    """What failed, if there is no reward."""
    detail: str = ""
    """Detail of the failure, or the end of the output of a solution that did not exit with 0."""
    replaced: list[str] = []
    """The programs that a hollow trial replaced."""
    seconds: float


@dataclass(frozen=True)
class TrialSpec:
    """A trial to run."""

    task: Task
    key: str
    kind: Kind
    number: int
    variation: Variation | None = None
    where: Where | None = None
    """Where it is verified; None: where the task says."""

    @property
    def name(self) -> tuple[str, Kind, int, str, str]:
        return self.key, self.kind, self.number, self.variation.name if self.variation else "", self.where or ""


async def run_trial(sandboxes: Sandboxes, spec: TrialSpec) -> Trial:
    """Run one trial in a sandbox of its own. Failures are part of the result and not raised.

    UserError and PoolError end the command.
    """
    began = time.monotonic()
    reward: float | None = None
    replaced: list[str] = []
    failure: Literal["environment", "verifier"] | None = None
    try:
        verdict, detail, replaced = await _verified(sandboxes, spec)
        reward = verdict.reward
    except AttemptFailed as failed:
        failure, detail = "verifier" if failed.kind == "verifier" else "environment", failed.detail
    except (SandboxError, OSError) as error:  # this machine's disk is full, say
        failure, detail = "environment", str(error)
    except (UserError, PoolError):
        raise
    except Exception as error:  # a failed trial is a row, whatever broke
        failure, detail = "environment", f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    key, kind, number, variation, where = spec.name
    return Trial(
        task=key,
        kind=kind,
        number=number,
        variation=variation,
        where=where,
        reward=reward,
        failure=failure,
        detail=detail[-2000:],
        replaced=replaced,
        seconds=seconds,
    )


async def _verified(sandboxes: Sandboxes, spec: TrialSpec) -> tuple[Verdict, str, list[str]]:
    """Verify all parts. Returns the verdict, remarks on solutions that did not exit with 0, and hollow programs."""
    task, variations = verified_at(spec.task, spec.where), [spec.variation] if spec.variation else []
    if task.network == "model" and sandboxes.kind != "process":  # there is no model in a trial
        task = msgspec.structs.replace(task, network="none")
    applied = Applied()
    verdicts: list[tuple[str, Verdict]] = []
    remarks: list[str] = []
    replaced: list[str] = []
    sandbox = await sandboxes.start(spec_of(task))
    try:
        for part in parts_of(task):
            await set_up(sandbox, part.task)
            if variations:
                applied = await vary(sandbox, task, sandboxes.kind, variations)
                variations = []
            snapshot = await take_snapshot(sandbox, part.task, sandboxes, applied.files)
            remarks += [await _solve(sandbox, part, applied.env)] if spec.kind != "no-op" else []
            replaced += await hollow_out(sandbox, part.task, snapshot) if spec.kind == "hollow" else []
            async with verifier_sandbox(
                sandboxes, sandbox, part.task, snapshot, before=part.before, more=part.more
            ) as (room, _):
                verdict = await verify(room, part.task)
            verdicts.append((part.name, verdict))
            if below(verdict, part.min_reward):
                break
    finally:
        await sandbox.stop()
    whole = joined(verdicts, task.steps_reward) if task.steps else verdict
    return whole, "; ".join(filter(None, remarks)), replaced


def verified_at(task: Task, where: Where | None) -> Task:
    """The task, verified at another place than its own; None changes nothing."""
    if where is None:
        return task
    verifier = msgspec.structs.replace(task.verifier, where=where)
    steps = tuple(
        msgspec.structs.replace(step, verifier=msgspec.structs.replace(step.verifier, where=where))
        for step in task.steps
    )
    return msgspec.structs.replace(task, verifier=verifier, steps=steps)


async def _solve(sandbox: Sandbox, part: TaskPart, env: Mapping[str, str]) -> str:
    """Run the oracle as the agent would be run. Returns a remark when it does not exit with 0, else nothing."""
    task, solution = part.task, part.task.solution
    if solution is None:
        raise AttemptFailed("harness", f"step {part.name} has no solution")
    for path, source in solution.directories.items():
        await sandbox.put(Path(source), path)
    result = await sandbox.run(solution.command, task.command_limits(task.timeout), task.env | dict(env) | solution.env)
    if result.ended == "exit" and not result.exit_code:
        return ""
    how = f"exit code {result.exit_code}" if result.ended == "exit" else f"its {result.ended} limit"
    return f"the solution ended by {how}: {result.output[-500:].strip()}"
