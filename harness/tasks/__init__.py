"""Tasks: what one is (schema), and where they come from (jsonl, harbor, sources, mix)."""

from harness.tasks.jsonl import load_tasks
from harness.tasks.schema import Step, Task, TaskLimits, Verifier, steps_of

__all__ = ["Step", "Task", "TaskLimits", "Verifier", "load_tasks", "steps_of"]
