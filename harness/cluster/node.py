"""Runs in Ray's worker processes: makes one attempt, and removes what dead workers left.

A worker process makes one attempt at a time and owns its sandboxes. When a worker was killed, the next worker process
of that node removes its sandboxes before it begins. The driver writes the rollout's outcome, not the node, so a node
that was given up and comes back changes nothing.
"""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

from harness.agents.base import Agent
from harness.cluster.pickling import NodeReport, NodeSetup, unpack
from harness.cluster.task_directories import make_place, unpack_directories, with_directories
from harness.rollout.attempt import make_attempt
from harness.rollout.context import RolloutJob, RunContext
from harness.tasks.stored import stored_task
from proxy.pool.errors import PoolError, UserError
from proxy.pool.rollouts.groups import OpenRollout, Outcome
from sandboxes.gc import remove_leftovers
from sandboxes.local.process import remove

WAKE_SECONDS = 0.2


def attempt_here(
    station: NodeSetup, packed: bytes, rollout: OpenRollout, agent: Agent, parcel: bytes | None
) -> NodeReport:
    """Make one attempt. When Ray cancels it, the agent is ended and the attempt closed before this returns.

    An error of the node itself (a full disk, say) is the failure `harness`, which another node tries again.
    """
    try:
        return _report(station, packed, rollout, agent, parcel)
    except ImportError:  # ends the run, which says what to install
        raise
    except Exception as error:  # whatever broke here may work on another node
        detail = f"{type(error).__name__}: {error}"
        failed = Outcome(attempt_id=None, reward=None, failure="harness", detail=detail)
        return NodeReport(node=_this_node(), outcome=failed, logs={})


def _this_node() -> str:
    import ray  # an optional dependency

    node: str = ray.get_runtime_context().get_node_id()
    return node


def _report(station: NodeSetup, packed: bytes, rollout: OpenRollout, agent: Agent, parcel: bytes | None) -> NodeReport:
    outcome = error = None
    place = make_place()
    logs = place / "logs"
    logs.mkdir()
    try:
        local = {"logs": logs, "sandboxes": station.make_sandboxes()}
        task = stored_task(_with_copies(rollout.task, parcel, place))
        job = RolloutJob(rollout, task, agent)
        outcome = _runner().run(_attempt(unpack(packed, _opened(station) | local), job))
    except (UserError, PoolError) as raised:
        error = raised
    finally:
        kept = {str(path.relative_to(logs)): path.read_bytes() for path in logs.rglob("*") if path.is_file()}
        remove(place)
    return NodeReport(node=_this_node(), outcome=outcome, error=error, logs=kept)


def _with_copies(task: dict[str, Any], parcel: bytes | None, place: Path) -> dict[str, Any]:
    """The task, naming the unpacked directories instead of those of the driver's machine."""
    if parcel is None:
        return task
    unpack_directories(parcel, place)
    local_task: dict[str, Any] = with_directories(task, lambda source: str(place / source.lstrip("/")))
    return local_task


def clean_up() -> int:
    """Remove what dead processes left on this node and its Docker daemon. Returns how many things that were."""
    removed = remove_leftovers()
    return len(removed.sandboxes) + len(removed.resources)


async def _attempt(context: RunContext, job: RolloutJob) -> Outcome:
    waking = asyncio.create_task(_wake_up())
    try:
        return await make_attempt(context, job)
    finally:
        waking.cancel()
        await context.sandboxes.close()  # this process may get no further attempt


async def _wake_up() -> None:
    """Wake the event loop now and then: Ray cancels by a flag that a sleeping interpreter does not see."""
    while True:
        await asyncio.sleep(WAKE_SECONDS)


@cache
def _runner() -> asyncio.Runner:
    """One event loop for the process, since a context's connections belong to one loop."""
    return asyncio.Runner()


@cache
def _opened(station: NodeSetup) -> dict[str, Any]:
    """Open what contexts need on this node, once for all attempts of this process; before that, clean up."""
    clean_up()
    return station.opened()
