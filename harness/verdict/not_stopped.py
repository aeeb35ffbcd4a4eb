"""Says what an agent can do to a verdict that is reached in its own sandbox.

Each kind has ways in tests/harness/cheats.py, which the tests try. In a fresh sandbox none of them earns anything.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from harness.tasks import Task, parts_of
from harness.tasks.where import judged_fresh

Kind = Literal["neighbours", "links", "repository", "programs", "processes", "room"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SENTENCES: dict[Kind, str] = {
    "neighbours": "modules, packages and settings beside the verifier's files are read before the installed ones",
    "links": "a link in the work may lead to the verifier's own files",
    "repository": "git runs what the work's own configuration names, such as filters",
    "programs": "root can change packages, settings and links of the system that are not put back",
    "processes": "a process that hides, or that took over one of the task's, lives on beside the verifier",
    "room": "a full disk, memory or process table turns a failing verdict into none",
}


def not_stopped(task: Task, sandboxes: str) -> dict[Kind, str]:
    """Kind -> sentence for a task in sandboxes of this kind; empty where each of its verdicts is reached afresh."""
    shared = [
        part.task for part in parts_of(task) if part.task.domain == "agent" and not judged_fresh(part.task, sandboxes)
    ]
    if not shared:
        return {}
    kinds: set[Kind] = {"neighbours", "links", "repository", "room"}
    if task.profile == "harbor":
        kinds.add("programs")
    if task.daemons or task.services or sandboxes == "process":
        kinds.add("processes")
    return {kind: SENTENCES[kind] for kind in KINDS if kind in kinds}


def shared_tasks(tasks: Sequence[Task], sandboxes: str) -> str:
    """One line on the tasks that are judged in the agent's sandbox; empty when there are none."""
    kinds = [found for task in tasks if (found := not_stopped(task, sandboxes))]
    if not kinds:
        return ""
    union = ", ".join(kind for kind in KINDS if any(kind in found for found in kinds))
    return (
        f"{len(kinds)} of {len(tasks)} tasks are judged in the agent's own sandbox, where cheating by {union} is not "
        "stopped (docs/security.md says what these are)"
    )
