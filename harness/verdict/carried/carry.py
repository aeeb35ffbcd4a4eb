"""Carries an agent's work from its frozen sandbox into a fresh one, as data.

Both sandboxes are packed from outside and compared, so only what differs is written. What would steer the verifier
(steering.py), what git would obey (git.py) and what the task leaves out stay as the fresh sandbox has them.
"""

import asyncio
import shlex
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from harness.environment.archive import Entry, TooMuch
from harness.environment.artifacts import HEADERS, artifacts_of, limit_of, root_of
from harness.environment.file_manifest import FileDifference, in_commands
from harness.environment.snapshot import Snapshot, contents
from harness.environment.varied import VariedFiles
from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.verdict.carried.compare import Comparison, Place, Plan, compare
from harness.verdict.carried.steering import LIST_MODULES
from harness.verdict.findings import IsolationFindings
from sandboxes.base import Limits, Sandbox, SandboxError, User
from sandboxes.local.process import default_root, make_sandbox_directory
from sandboxes.local.process import remove as remove_directory

SECONDS = 300.0


@dataclass
class Parcel:
    """One artifact on its way."""

    place: Place
    staging: Path
    archive: IO[bytes] | None = None
    """None: the agent left nothing there."""


@dataclass(frozen=True)
class Parcels:
    """All artifacts of a task on their way."""

    task: Task
    limit: int
    """Bytes of all files of one artifact together."""
    each: Sequence[Parcel]
    initial: Mapping[str, Mapping[str, Entry]] | None
    """What lay there before the agent, where only its changes travel."""
    varied: VariedFiles
    """What variations of the environment had changed there."""
    files: ExitStack
    """Open archives."""
    evidence: bool = False
    """Whether somebody looks at what the agent changed."""


@asynccontextmanager
async def parcels_of(sandbox: Sandbox, task: Task, snapshot: Snapshot) -> AsyncIterator[Parcels]:
    """Give the task's artifacts, which `pick_up` and `deliver` carry."""
    places = places_of(task, sandbox)
    directory = make_sandbox_directory(default_root())  # gc finds it after kill -9
    try:
        with ExitStack() as files:
            each = [Parcel(place, directory / str(number)) for number, place in enumerate(places)]
            limit, evidence = limit_of(snapshot.spec.disk_mb), snapshot.work is not None
            yield Parcels(task, limit, each, snapshot.initial, snapshot.varied, files, evidence)
    finally:
        await asyncio.to_thread(remove_directory, directory)


async def pick_up(parcels: Parcels, sandbox: Sandbox) -> None:
    """Pack the artifacts of a frozen sandbox, from outside. After that it is not needed."""
    for parcel in parcels.each:
        archive = parcels.files.enter_context(tempfile.TemporaryFile())
        artifact = parcel.place.artifact
        if await sandbox.pack(artifact.place, archive, parcels.limit + HEADERS, artifact.service):
            parcel.archive = archive


async def deliver(parcels: Parcels, fresh: Sandbox) -> IsolationFindings:
    """Put artifacts into a fresh sandbox that is set up, as data. AttemptFailed when they hold too much."""
    loop = asyncio.get_running_loop()

    def modules() -> Collection[str]:  # asked from the thread that compares
        asking = fresh.run(LIST_MODULES, Limits(seconds=SECONDS), {})
        result = asyncio.run_coroutine_threadsafe(asking, loop).result()
        if result.cut:  # without the list, what shadows a module would travel
            raise SandboxError("the Python modules of the fresh sandbox cannot be listed: the end of the list was lost")
        if result.exit_code or result.dropped:
            how = f"python3 ended with code {result.exit_code} and {result.dropped} bytes too many"
            raise SandboxError(f"the Python modules of the fresh sandbox cannot be listed ({how}); see to its image")
        return result.output.split()

    findings = IsolationFindings(FileDifference(), [], [], [])
    for parcel in parcels.each:
        given = Comparison(
            task=parcels.task,
            place=parcel.place,
            modules=modules,
            staging=parcel.staging,
            limit=parcels.limit,
            initial=None if parcels.initial is None else parcels.initial.get(parcel.place.root, {}),
            varied=parcels.varied.get(parcel.place.root, {}),
        )
        with tempfile.TemporaryFile() as ours:
            here = await fresh.pack(parcel.place.artifact.place, ours, 2 * parcels.limit + HEADERS)
            try:
                plan = await asyncio.to_thread(compare, given, parcel.archive, ours if here else None, findings)
            except TooMuch as error:
                raise AttemptFailed("verifier", str(error)) from error
        if parcels.evidence:
            await _note_originals(fresh, parcel.place, findings)
        await _apply(fresh, given, plan)
    difference = findings.difference
    for paths in (difference.added, difference.changed, difference.removed):
        paths.sort()
    return findings


async def _note_originals(fresh: Sandbox, place: Place, findings: IsolationFindings) -> None:
    """Note what the files at a place hold that the agent changed or removed in its own sandbox."""
    difference, here = findings.difference, root_of(place.artifact, fresh)
    altered = [path for path in (*difference.changed, *difference.removed) if path.startswith(f"{place.root}/")]
    paths = {f"{here}{path[len(place.root) :]}": path for path in altered}
    with suppress(SandboxError):  # then what they held is not known, and the verdict does not need it
        held = await contents(fresh, list(paths))
        findings.originals.update({paths[path]: content for path, content in held.items()})


def places_of(task: Task, sandbox: Sandbox) -> list[Place]:
    """The task's artifacts as places. AttemptFailed when the working directory is the whole file system."""
    places = []
    for artifact in artifacts_of(task):
        root, work = PurePosixPath(root_of(artifact, sandbox)), PurePosixPath(sandbox.work)
        below = str(root.relative_to(work)) if root.is_relative_to(work) else None
        inside = str(work.relative_to(root)) if below is None and work.is_relative_to(root) else None
        if str(root) == "/":
            detail = "the working directory is /, which cannot be carried into a fresh sandbox"
            raise AttemptFailed("verifier", f"{detail}; give the task `work`, `verifier.artifacts` or where = 'shared'")
        places.append(Place(artifact, str(root), "" if below == "." else below, inside))
    return places


async def _apply(fresh: Sandbox, given: Comparison, plan: Plan) -> None:
    """Make the place in the fresh sandbox what the plan says. Nothing of the agent's runs there yet."""
    root, path, staging = root_of(given.place.artifact, fresh), given.place.artifact.place, given.staging
    for paths in in_commands([f"{root}/{one}" if one else root for one in plan.clear]):
        await _command(fresh, f"rm -rf -- {paths}", "root")
    if not plan.write:
        return
    if staging.is_dir():
        await fresh.put(staging, path)
    else:
        await fresh.write(path, await asyncio.to_thread(staging.read_bytes))
        if plan.executable:
            await _command(fresh, f"chmod a+x {shlex.quote(root)}", "agent")


async def _command(fresh: Sandbox, command: str, user: User) -> None:
    result = await fresh.run(command, Limits(seconds=SECONDS), {}, user)
    if result.exit_code:
        raise SandboxError(f"the agent's work cannot be carried into a fresh sandbox: {result.output[-300:].strip()}")
