"""What is known of a sandbox before its agent works in it: files, leftovers, and what steers a verifier.

`take_snapshot` is the last thing before the agent, so it is trusted: nothing of the policy has run yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness.environment.clean_start import Leftover, clean_start
from harness.environment.file_manifest import FileManifest, quoted, take_manifest, write_manifest
from harness.environment.protected_files import RUNNERS_NAMES, above_tests, steering
from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.tasks.schema import TaskImage
from sandboxes.base import Image, Limits, Sandbox, Sandboxes, Service, Spec

ORIGINAL_BYTES = 1 << 16
ORIGINALS_BYTES = 8 << 20
_CONTENTS = 'for f do [ -f "$f" ] && [ ! -L "$f" ] && printf "%s %s\\n" "$(wc -c < "$f")" "$f" && cat "$f"; done'


@dataclass(frozen=True)
class Snapshot:
    """A sandbox as the agent finds it."""

    spec: Spec
    own_root: bool
    """Its root is its own and not the machine's."""
    manifest: FileManifest
    leftovers: Sequence[Leftover] = ()
    changed: frozenset[str] = frozenset()
    """Paths of the image that set-up has changed, where the root can be written."""
    originals: dict[str, bytes] = field(default_factory=dict)
    """Absolute path -> content of small files that steer a verifier, to be put back when the agent changes them."""


async def take_snapshot(sandbox: Sandbox, task: Task, sandboxes: Sandboxes) -> Snapshot:
    """Clean up after set-up and remember what is there. Nothing of the agent may be running or lie there yet."""
    spec, own_root = spec_of(task), sandboxes.kind != "process"
    above = above_tests(task, sandbox.work, own_root)
    found = await take_manifest(sandbox, spec, own_root, above, RUNNERS_NAMES)
    manifest, rows = await clean_start(sandbox, task, found)
    steer = steering(task, sandbox, spec, own_root)
    known = [path for path in sorted(manifest.files) if steer(path)]
    originals = await _contents(sandbox, known) if known else {}
    return Snapshot(spec, own_root, manifest, rows, frozenset(await sandbox.changed()), originals)


async def _contents(sandbox: Sandbox, paths: list[str]) -> dict[str, bytes]:
    """The contents of those of the files that are small."""
    said = bytearray()
    command = f"set -- {' '.join(map(quoted, paths[:500]))}\n{_CONTENTS}"
    await sandbox.run(command, Limits(seconds=60, output_bytes=1 << 10), {}, on_output=said.extend)
    found, at = {}, 0
    while at < min(len(said), ORIGINALS_BYTES) and (end := said.find(b"\n", at)) > 0:
        size, _, path = said[at:end].decode(errors="replace").partition(" ")
        at = end + 1 + int(size)
        if int(size) <= ORIGINAL_BYTES:
            found[path] = bytes(said[end + 1 : at])
    return found


def write_snapshot(directory: Path, name: str, snapshot: Snapshot) -> None:
    """Write what there was before the agent: NAME.manifest.json.gz and NAME.leftovers.json."""
    write_manifest(directory / f"{name}.manifest.json.gz", snapshot.manifest)
    (directory / f"{name}.leftovers.json").write_bytes(msgspec.json.encode(snapshot.leftovers))


def spec_of(task: Task) -> Spec:
    """The sandbox that a task asks for."""
    limits = task.limits
    return Spec(
        image=None if task.image is None else image_of(task.image),
        profile=task.profile,
        network=task.network,
        work=task.work or None,
        memory_mb=limits.memory_mb,
        cpus=limits.cpus,
        pids=limits.pids,
        disk_mb=limits.disk_mb,
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
    """What a task calls an image, as sandboxes take it."""
    context = Path(image.directory) if image.directory else None
    return Image(name=image.name, context=context, dockerfile=image.dockerfile)


async def set_up(sandbox: Sandbox, task: Task) -> None:
    """Bring in the task's files and run its set-up; AttemptFailed when that does not succeed."""
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
