"""Keeps variations of the environment from the verifier: refuses those that it would see, and notes what others change.

A fresh sandbox is set up without variations, but what lies in the working directory travels there from the agent's. So
the files that a variation has changed there are noted. Those that the agent leaves like that do not travel
(harness/verdict/carried/compare.py). Where the verdict is reached in the agent's sandbox, nothing could be kept apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.environment.archive import Entry
from harness.environment.artifacts import artifacts_of, limit_of, state_of
from harness.environment.augment import Variation, apply
from harness.tasks import Task, parts_of
from harness.tasks.verdict_options import Augment
from harness.tasks.where import verified_fresh
from proxy.pool.errors import UserError
from sandboxes.base import Sandbox

VariedFiles = Mapping[str, Mapping[str, Entry | None]]
"""Absolute path of an artifact -> path below it that a variation has changed -> what lies there now, None: nothing."""


@dataclass(frozen=True)
class Applied:
    """What variations have made of an attempt's environment."""

    names: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the agent."""
    files: VariedFiles = field(default_factory=dict)


async def vary(sandbox: Sandbox, task: Task, kind: str, selected: Sequence[Variation]) -> Applied:
    """Apply variations to a sandbox that is set up for the first step of a task. `kind`: of the sandboxes.

    AttemptFailed("sandbox_start") when a variation's command fails.
    """
    fresh = [part.task for part in parts_of(task) if verified_fresh(part.task, kind)]
    noted = [artifact for each in fresh for artifact in artifacts_of(each) if not artifact.service]
    if not any(variation.changes_files for variation in selected):
        noted = []
    limit = limit_of(task.limits.disk_mb)
    before = await state_of(sandbox, noted, limit)
    names, env = await apply(sandbox, task, selected)
    after = await state_of(sandbox, noted, limit)
    return Applied(names, env, {root: _changes(before.get(root, {}), after.get(root, {})) for root in before | after})


def _changes(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> dict[str, Entry | None]:
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return {path: after.get(path) for path in paths}


def check_unseen(tasks: Iterable[Task], of_run: Augment | None, kind: str) -> None:
    """Check that no verifier sees what varies. UserError for the first task whose verifier would.

    `of_run`: the variations of tasks that declare none. `kind`: of the sandboxes.
    """
    for task in tasks:
        augment = task.augment or of_run
        if augment is None or task.domain != "agent":
            continue
        verifiers = [part.task for part in parts_of(task)]
        # a process sandbox skips the other ones that change files
        changing = [name for name in augment.changing if kind != "process" or name == "commands"]
        if changing and not all(verified_fresh(each, kind) for each in verifiers):
            raise UserError(
                f"the variation {changing[0]!r} changes the sandbox in which task {task.id!r} is judged, so the "
                "verifier would see it; leave it out, or judge the task with verifier.where = 'fresh'"
            )
        replacing = [name for name in changing if name in ("commands", "remove")]
        if replacing and any(each.verifier.environment is not None for each in verifiers):
            raise UserError(
                f"the variation {replacing[0]!r} may change files of task {task.id!r} that travel to the verifier's "
                "own environment, which has no others; leave it out, or leave out verifier.environment"
            )
