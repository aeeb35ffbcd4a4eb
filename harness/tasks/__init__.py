"""Tasks: what one is (schema), and where they come from (jsonl, harbor, sources, mix). Nothing here runs one."""

from harness.tasks.jsonl import load_tasks
from harness.tasks.schema import Step, Task, TaskLimits, TaskPart, Verifier, parts_of

__all__ = ["TaskPart", "Step", "Task", "TaskLimits", "Verifier", "load_tasks", "parts_of"]
