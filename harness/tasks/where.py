"""Says in which sandbox a task's verifier runs: in a fresh one, or in the one that the agent worked in."""

from harness.tasks.schema import Task


def verified_fresh(task: Task, kind: str) -> bool:
    """Whether the task's verifier runs in a fresh sandbox, where sandboxes are of this kind.

    Daemons live in the agent's sandbox only, and process sandboxes would not keep an agent out of a fresh one.
    """
    if task.verifier.where is not None:
        return task.verifier.where == "fresh"
    return kind != "process" and not task.daemons
