"""Says in the pool's audit log which attempt was given a full network, and which places that leads to."""

from harness.async_pool import AsyncPool
from harness.tasks import Task
from proxy.pool.rollouts.attempts import Attempt
from proxy.pool.rollouts.runs import record_event


async def note_egress(pool: AsyncPool, attempt: Attempt, who: str, task: Task, kind: str) -> None:
    """Note the full network of an attempt's agent or verifier (`who`). `kind`: that of its sandboxes.

    In Docker it leads to the Internet and, of what is near or private, to what the task's `reach` names. Other kinds
    keep nothing away.
    """
    places = ", ".join(("the Internet", *task.reach)) if kind == "docker" else "whatever its machine reaches"
    await pool(record_event, attempt.run_id, "egress", f"attempt {attempt.id} of {attempt.agent}, {who}: {places}")
