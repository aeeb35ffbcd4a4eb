"""Says what a verdict in the agent's own sandbox cannot stop, for a run's first lines and for reports."""

from collections.abc import Sequence

from harness.tasks import Task, parts_of
from harness.tasks.where import judged_fresh

NAMED = 5
"""Tasks that a warning names; of the others it gives the number."""


def not_stopped(task: Task, kind: str) -> list[str]:
    """What an agent may do to this task's verdict, where sandboxes are of this kind. Empty for fresh sandboxes."""
    shared = [part.task for part in parts_of(task) if part.task.domain == "agent" and not judged_fresh(part.task, kind)]
    if not shared:
        return []
    if kind == "process":
        return ["the agent is the verifier's user, so it can change whatever the verifier reads and writes"]
    risks = ["modules and packages that the agent put beside the tests, or installed, may be imported by them"]
    if any(part.daemons or part.services for part in shared):
        risks.append("a script inside ends the agent's processes, as daemons or services stay, and may miss some")
    if any(part.profile == "harbor" for part in shared):
        risks.append("the agent is root, so what it installed outside of the image's own tools stays")
    return risks


def shared_warning(tasks: Sequence[Task], kind: str) -> str:
    """One line on a run's tasks that are judged in the agent's own sandbox; empty when none is."""
    found = {task.id: not_stopped(task, kind) for task in tasks}
    shared = {name: risks for name, risks in found.items() if risks}
    if not shared:
        return ""
    names = ", ".join([*list(shared)[:NAMED], *([f"{len(shared) - NAMED} more"] if len(shared) > NAMED else [])])
    risks = dict.fromkeys(risk for each in shared.values() for risk in each)
    number = f"{len(shared)} of {len(tasks)} {'task is' if len(tasks) == 1 else 'tasks are'}"
    return f"{number} judged in the agent's own sandbox ({names}): {'; '.join(risks)}"
