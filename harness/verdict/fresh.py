"""Sandboxes in which no agent has run: the verdict is reached there, from data of the agent's or from none at all."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec

from harness.environment.snapshot import Snapshot, set_up, spec_of
from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.tasks.schema import VerifierEnvironment
from harness.verdict.carried.carry import deliver, parcels_of, pick_up, places_of
from harness.verdict.findings import IsolationFindings
from harness.verdict.room import VerifierSandbox, verifier_room
from harness.verdict.verifier import verify
from sandboxes.base import Sandbox, SandboxError, Sandboxes, Spec


@asynccontextmanager
async def fresh_room(
    sandboxes: Sandboxes, sandbox: Sandbox, task: Task, snapshot: Snapshot, before: Sequence[Task], more: bool
) -> AsyncIterator[tuple[VerifierSandbox, IsolationFindings]]:
    """Give a verifier's room in a fresh sandbox that holds the frozen one's work as data, and what the agent had done.

    Unless `more` steps follow, the agent's sandbox is stopped. `before`: the tasks of the steps before this one.
    """
    async with parcels_of(sandbox, task, snapshot) as parcels:
        packing = asyncio.create_task(pick_up(parcels, sandbox))  # meanwhile the fresh one starts
        leaving = asyncio.create_task(_leave(packing, sandbox, task, more))
        try:
            async with fresh_sandbox(sandboxes, task, snapshot, before, beside=more) as fresh:
                await packing
                findings = await deliver(parcels, fresh)
                given = [place.root for place in places_of(task, fresh) if place.below is None]
                yield await verifier_room(fresh, task, snapshot, given), findings
                await leaving
        finally:
            packing.cancel()
            await asyncio.wait({leaving})
            if not leaving.cancelled():
                leaving.exception()  # where another error is raised, asyncio would print this one's traceback


async def _leave(packing: "asyncio.Task[None]", sandbox: Sandbox, task: Task, more: bool) -> None:
    """Stop the agent's sandbox once its work is packed, or let it go on if `more` steps follow.

    It is stopped also where packing fails: on a host with a limit the fresh one may be waiting for its place.
    """
    await asyncio.wait({packing})
    failed = packing.cancelled() or packing.exception() is not None
    if not more:
        await sandbox.stop()
    elif not failed:
        await _go_on(sandbox, task)


async def _go_on(sandbox: Sandbox, task: Task) -> None:
    """End what the agent left running, so that its sandbox can serve the next step."""
    if task.daemons or task.services:
        await sandbox.thaw()
        await sandbox.end_processes()
    else:
        await sandbox.restart()


@asynccontextmanager
async def fresh_sandbox(
    sandboxes: Sandboxes, task: Task, snapshot: Snapshot, before: Sequence[Task], *, beside: bool
) -> AsyncIterator[Sandbox]:
    """Give a sandbox of the task in which no agent has run, set up as the agent's was.

    `beside`: it gets no place of the agent's, whose sandbox stays for the next step or has left.
    """
    spec = snapshot.spec
    if task.verifier.environment is not None:
        before, task = (), in_own_environment(task, task.verifier.environment)
        spec = spec_of(task)
    if task.verifier.network or (spec.network == "model" and sandboxes.kind != "process"):
        spec = replace(spec, network=task.verifier.network or "none")  # no key for the model is there
    if spec.disk_mb is not None:  # a disk that the agent has filled must not keep the verifier from its verdict
        spec = replace(spec, disk_mb=2 * spec.disk_mb)
    async with verdict_sandbox(sandboxes, replace(spec, beside=beside, first=not beside)) as fresh:
        for earlier in before:
            await set_up(fresh, earlier)
        try:
            await set_up(fresh, task)
        except AttemptFailed as error:
            if before:
                why = "the set-up of this step fails where no agent has worked"
                way = "judge it with verifier.where = 'shared'"
                raise AttemptFailed("verifier", f"{why}; {way} ({error.detail})") from error
            raise
        if not task.daemons and any(each.setup for each in (*before, task)) and not await fresh.alone():
            await fresh.end_processes()
        yield fresh


@asynccontextmanager
async def verdict_sandbox(sandboxes: Sandboxes, spec: Spec) -> AsyncIterator[Sandbox]:
    """Give a sandbox for a verdict. AttemptFailed("outage") where what runs it, such as one of several hosts, was away.

    So nobody else is blamed for that: whether the agent's sandbox was away says nothing about this one.
    """
    began = time.monotonic()
    sandbox = await sandboxes.start(spec)
    try:
        try:
            yield sandbox
        finally:
            await sandbox.stop()
    except (AttemptFailed, SandboxError) as error:
        if await sandboxes.was_away(began, sandbox):
            raise AttemptFailed("outage", f"what ran the verifier's sandbox was away ({error})") from error
        raise


def in_own_environment(task: Task, own: VerifierEnvironment) -> Task:
    """The task as the verifier's own environment knows it: without the files and the set-up of the agent's."""
    image, services = (own.image, ()) if own.image else (task.image, task.services)
    return msgspec.structs.replace(
        task,
        image=image,
        services=services,
        work=own.work,
        env=own.env,
        limits=own.limits,
        files={},
        directories={},
        setup=own.setup,
    )


async def gives_verdict_untouched(sandboxes: Sandboxes, task: Task, snapshot: Snapshot, before: Sequence[Task]) -> bool:
    """Whether the verifier comes to a verdict in a sandbox that no agent has touched.

    AttemptFailed("outage") when that cannot be said, because what ran the sandbox was away.
    """
    try:
        # beside: its place may have gone to an agent whose verdict waits for this one
        async with fresh_sandbox(sandboxes, task, snapshot, before, beside=True) as fresh:
            await verify(await verifier_room(fresh, task, snapshot), task)
    except (AttemptFailed, SandboxError) as error:
        if isinstance(error, AttemptFailed) and error.kind == "outage":
            raise
        return False
    return True
