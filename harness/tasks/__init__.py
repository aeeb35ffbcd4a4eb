"""Tasks: what one is (schema), and where they come from (jsonl, harbor, sources, mix)."""

from harness.tasks.jsonl import load_tasks
from harness.tasks.schema import Part, Step, Task, TaskLimits, Verifier, parts_of

__all__ = ["Part", "Step", "Task", "TaskLimits", "Verifier", "load_tasks", "parts_of"]
