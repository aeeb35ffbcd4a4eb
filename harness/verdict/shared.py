"""Says what a verdict in the agent's own sandbox cannot stop, for a run's first lines and for reports.

Each kind has ways in tests/harness/cheats.py, which the tests try. In a fresh sandbox none of them earns anything.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from harness.tasks import Task, parts_of
from harness.tasks.where import verified_fresh

Kind = Literal["neighbours", "links", "repository", "programs", "processes", "room"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SENTENCES: dict[Kind, str] = {
    "neighbours": "modules, packages and settings beside the verifier's files are read before the installed ones",
    "links": "a link in the work may lead to the verifier's own files",
    "repository": "git runs what the work's own configuration names, such as filters",
    "programs": "root can change packages, settings and links of the system that are not put back",
    "processes": "a process that hides, or that took over one of the task's, lives on beside the verifier",
    "room": "a full disk, memory or process table, or a locked directory, turns a failing verdict into none",
}
NAMED = 5
"""Tasks that a warning names; of the others it gives the number."""


def not_stopped(task: Task, sandboxes: str) -> dict[Kind, str]:
    """Kind -> sentence for a task in sandboxes of this kind; empty where each of its verdicts is reached afresh."""
    parts = (part.task for part in parts_of(task))
    if not any(part.domain == "agent" and not verified_fresh(part, sandboxes) for part in parts):
        return {}
    kinds: set[Kind] = {"neighbours", "links", "repository", "room"}
    if task.profile == "harbor":
        kinds.add("programs")
    if task.daemons or task.services or sandboxes == "process":  # else all processes are ended from outside
        kinds.add("processes")
    return {kind: SENTENCES[kind] for kind in KINDS if kind in kinds}


def shared_warning(tasks: Sequence[Task], sandboxes: str) -> str:
    """One line on a run's tasks that are verified in the agent's own sandbox; empty when none is."""
    kinds_of = {task.id: these for task in tasks if (these := not_stopped(task, sandboxes))}
    if not kinds_of:
        return ""
    names = ", ".join([*list(kinds_of)[:NAMED], *([f"{len(kinds_of) - NAMED} more"] if len(kinds_of) > NAMED else [])])
    kinds = ", ".join(kind for kind in KINDS if any(kind in each for each in kinds_of.values()))
    number = f"{len(kinds_of)} of {len(tasks)} {'task is' if len(tasks) == 1 else 'tasks are'}"
    return (
        f"{number} verified in the agent's own sandbox ({names}), where cheating by {kinds} is not stopped "
        "(docs/security.md says what these are)"
    )
