"""Sets up a sandbox and takes a snapshot of it before the agent works there: its files, and what steers a verifier.

`take_snapshot` is the last thing before the agent, so it can be trusted: nothing of the policy has run yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness.environment.archive import Entry
from harness.environment.artifacts import initial_state
from harness.environment.clean_start import Leftover, clean_start
from harness.environment.file_manifest import FileManifest, in_commands, take_manifest, write_manifest
from harness.environment.protected_files import RUNNERS_NAMES, above_tests, steering
from harness.environment.varied import VariedFiles
from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.tasks.schema import TaskImage
from harness.tasks.where import verified_fresh
from sandboxes.base import Image, Limits, Sandbox, SandboxError, Sandboxes, Service, Spec

ORIGINAL_BYTES = 1 << 16
ORIGINALS_BYTES = 8 << 20
MOST_CONTENTS = 500
CONTENTS_SECONDS = 60
_CONTENTS = f"""for f do [ -f "$f" ] && [ ! -L "$f" ] && size=$(($(wc -c < "$f"))) && [ $size -le {ORIGINAL_BYTES} ] &&
    printf "%s %s\\n" $size "$f" && cat "$f"; done"""


@dataclass(frozen=True)
class Snapshot:
    """The state of a sandbox as the agent finds it."""

    spec: Spec
    own_root: bool
    """Whether the sandbox has a root file system of its own, not this machine's."""
    manifest: FileManifest
    fresh: bool = False
    """Whether the verdict is reached in a fresh sandbox."""
    leftovers: Sequence[Leftover] = ()
    changed: frozenset[str] = frozenset()
    """Paths of the image that set-up has changed, where the root is writable."""
    originals: dict[str, bytes] = field(default_factory=dict)
    """Absolute path -> content of small files that steer a verifier, to be restored when the agent changes them."""
    initial: Mapping[str, Mapping[str, Entry]] | None = None
    """Absolute path of each artifact -> what lies there, where only the agent's changes travel."""
    work: Mapping[str, bytes] | None = None
    """Absolute path -> content of small files of the working directory, as evidence of what the agent changes.
    None: nobody looks. Empty where the verdict is reached in a fresh sandbox, which still has them."""
    varied: VariedFiles = field(default_factory=dict)
    """What variations of the environment have changed where the agent's work travels from."""


async def take_snapshot(
    sandbox: Sandbox, task: Task, sandboxes: Sandboxes, varied: VariedFiles | None = None, *, evidence: bool = False
) -> Snapshot:
    """Clean up after set-up, then record the sandbox's files. Call it before anything of the agent runs.

    `varied`: what variations have changed. `evidence`: somebody will look at what the agent changes.
    """
    spec, own_root = spec_of(task), sandboxes.kind != "process"
    above = above_tests(task, sandbox.work, own_root)
    before = await take_manifest(sandbox, spec, own_root, above, RUNNERS_NAMES)
    manifest, rows = await clean_start(sandbox, task, before)
    steer = steering(task, sandbox, spec, own_root)
    fresh = verified_fresh(task, sandboxes.kind)  # then nothing is put back in this one
    known = [] if fresh else [path for path in sorted(manifest.files) if steer(path)]
    originals = await contents(sandbox, known) if known else {}
    changed = frozenset() if fresh else frozenset(await sandbox.changed())
    initial = await initial_state(sandbox, task) if fresh and task.verifier.carry == "changes" else None
    work = (await _work_files(sandbox, manifest) if not fresh else {}) if evidence else None
    return Snapshot(spec, own_root, manifest, fresh, rows, changed, originals, initial, work, varied or {})


async def _work_files(sandbox: Sandbox, manifest: FileManifest) -> dict[str, bytes]:
    """What files of the working directory hold, those that look like tests first, as there may be too many."""
    below = [path for path in sorted(manifest.files) if path.startswith(f"{sandbox.work}/") and "/.git/" not in path]
    return await contents(sandbox, sorted(below, key=lambda path: "test" not in path))


async def contents(sandbox: Sandbox, paths: Sequence[str]) -> dict[str, bytes]:
    """Return what the first MOST_CONTENTS of these files hold, by absolute path. SandboxError when it takes too long.

    Left out: what is no regular file, files beyond ORIGINAL_BYTES, and what comes after ORIGINALS_BYTES in all.
    """
    known: dict[str, bytes] = {}
    for batch in in_commands([path for path in paths if "\n" not in path][:MOST_CONTENTS]):
        known |= await _contents(sandbox, batch, ORIGINALS_BYTES - sum(map(len, known.values())))
    return {path: known[path] for path in paths if path in known}  # a shell of the agent's may have named others


async def _contents(sandbox: Sandbox, paths: str, limit: int) -> dict[str, bytes]:
    """The contents of quoted paths, up to this number of bytes."""
    output = bytearray()

    def take(piece: bytes) -> None:
        output.extend(piece[: limit - len(output)] if len(output) < limit else b"")

    limits = Limits(seconds=CONTENTS_SECONDS, output_bytes=1 << 10)
    result = await sandbox.run(f"set -- {paths}\n{_CONTENTS}", limits, {}, on_output=take)
    if result.ended != "exit":
        raise SandboxError(f"the files of sandbox {sandbox.id} cannot be read: ended by its {result.ended} limit")
    if result.cut:
        raise SandboxError(f"the files of sandbox {sandbox.id} cannot be read: the end of what they hold was lost")
    known, at = {}, 0
    while at < len(output) and (end := output.find(b"\n", at)) > 0:
        size, _, path = output[at:end].decode(errors="replace").partition(" ")
        if not (size.isascii() and size.isdigit()):  # an agent with root rights may have put another shell there
            break
        at = end + 1 + int(size)
        if at <= len(output):
            known[path] = bytes(output[end + 1 : at])
    return known


def write_snapshot(directory: Path, name: str, snapshot: Snapshot) -> None:
    """Write the snapshot to the logs: NAME.manifest.json.gz and NAME.leftovers.json."""
    write_manifest(directory / f"{name}.manifest.json.gz", snapshot.manifest)
    (directory / f"{name}.leftovers.json").write_bytes(msgspec.json.encode(snapshot.leftovers))


def spec_of(task: Task) -> Spec:
    """The sandbox that a task asks for."""
    limits = task.limits
    return Spec(
        image=None if task.image is None else image_of(task.image),
        profile=task.profile,
        network=task.network,
        reach=task.reach,
        work=task.work or None,
        memory_mb=limits.memory_mb,
        cpus=limits.cpus,
        pids=limits.pids,
        disk_mb=limits.disk_mb,
        system_calls=limits.system_calls,
        env=task.env,
        services=tuple(
            Service(
                name=service.name,
                image=image_of(service.image),
                command=service.command,
                env=service.env,
                ready=service.ready,
                ready_seconds=service.ready_timeout,
            )
            for service in task.services
        ),
    )


def image_of(image: TaskImage) -> Image:
    """A task's image in the form that sandboxes take."""
    context = Path(image.directory) if image.directory else None
    return Image(name=image.name, context=context, dockerfile=image.dockerfile)


async def set_up(sandbox: Sandbox, task: Task) -> None:
    """Copy the task's files in and run its set-up. AttemptFailed("sandbox_start") when that fails."""
    for path, text in task.files.items():
        await sandbox.write(path, text)
    for path, source in task.directories.items():
        await sandbox.put(Path(source), path)
    if task.setup:
        result = await sandbox.run(task.setup, task.command_limits(task.setup_timeout), task.env)
        if result.ended != "exit" or result.exit_code:
            how = f"exit code {result.exit_code}" if result.ended == "exit" else f"its {result.ended} limit"
            raise AttemptFailed("sandbox_start", f"set-up ended by {how}: {result.output[-300:].strip()}")
    if task.daemons:
        await sandbox.keep_processes()
