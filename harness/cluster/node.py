"""What runs in Ray's worker processes: one attempt, and the removal of what dead workers left.

Each worker process works at one attempt at a time; it owns its sandboxes, so those of a worker that was killed are
orphans, which the next worker process of that node removes before it begins. Left out: the outcome of the rollout,
which the driver writes, so that a node that was given up for lost changes nothing when it comes back.
"""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from harness.agents.base import Agent
from harness.cluster.pickling import NodeReport, NodeSetup, unpack
from harness.cluster.task_directories import moved, own_place, unpacked
from harness.rollout import RolloutJob, RunContext, make_attempt
from harness.tasks import Task
from proxy.pool.errors import PoolError, UserError
from proxy.pool.rollouts.groups import OpenRollout, Outcome
from sandboxes.gc import remove_leftovers
from sandboxes.local.process import remove

WAKE_SECONDS = 0.2


def attempt_here(
    station: NodeSetup, packed: bytes, rollout: OpenRollout, agent: Agent, parcel: bytes | None
) -> NodeReport:
    """One attempt at a rollout. Cancelled by Ray, it ends its agent and closes the attempt before it returns."""
    import ray  # not where the harness drives no cluster

    node = ray.get_runtime_context().get_node_id()
    outcome = error = None
    place = own_place()
    logs = place / "logs"
    logs.mkdir()
    try:
        mine = {"logs": logs, "sandboxes": station.make_sandboxes()}
        task = msgspec.convert(_with_copies(rollout.task, parcel, place), Task)
        job = RolloutJob(rollout, task, agent)
        outcome = _runner().run(_attempt(unpack(packed, _opened(station) | mine), job))
    except (UserError, PoolError) as raised:
        error = raised
    finally:
        kept = {str(path.relative_to(logs)): path.read_bytes() for path in logs.rglob("*") if path.is_file()}
        remove(place)
    return NodeReport(node=node, outcome=outcome, error=error, logs=kept)


def _with_copies(task: dict[str, Any], parcel: bytes | None, place: Path) -> dict[str, Any]:
    """The task with the directories that came along in place of those of the driver's machine."""
    if parcel is None:
        return task
    unpacked(parcel, place)
    there: dict[str, Any] = moved(task, lambda source: str(place / source.lstrip("/")))
    return there


def clean_up() -> int:
    """Remove what dead owners left on this node and its engine, and say how much that was."""
    seen = remove_leftovers()
    return len(seen.sandboxes) + len(seen.resources)


async def _attempt(context: RunContext, job: RolloutJob) -> Outcome:
    waking = asyncio.create_task(_wake_up())
    try:
        return await make_attempt(context, job)
    finally:
        waking.cancel()
        await context.sandboxes.close()  # this process may never be asked again


async def _wake_up() -> None:
    """Ray cancels with a flag that the interpreter sees between two instructions: not while the loop sleeps."""
    while True:
        await asyncio.sleep(WAKE_SECONDS)


@cache
def _runner() -> asyncio.Runner:
    """One event loop for the process, since a context's connections belong to one loop."""
    return asyncio.Runner()


@cache
def _opened(station: NodeSetup) -> dict[str, Any]:
    clean_up()
    return station.opened()
