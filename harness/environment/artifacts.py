"""Where a task's artifacts lie in a sandbox, and what was there before the agent."""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from harness.environment.archive import MAX_ENTRIES, Entry, TooMuch, unpack
from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.tasks.schema import Artifact
from sandboxes.base import MAX_COPY_MB, Sandbox, TooMuchToCopy

HEADERS = MAX_ENTRIES * 1536
"""Bytes that the headers of an archive may take, besides the files."""
WHOLE = (Artifact(path="."),)
"""What travels where a task names nothing: the working directory."""


def artifacts_of(task: Task) -> Sequence[Artifact]:
    """What travels into a fresh sandbox. Services come last: what they left replaces what the agent left there."""
    return sorted(task.verifier.artifacts, key=lambda artifact: bool(artifact.service)) or WHOLE


def root_of(artifact: Artifact, sandbox: Sandbox) -> str:
    """The absolute path of an artifact in a sandbox."""
    base = PurePosixPath(sandbox.home if artifact.place.startswith("~/") else sandbox.work)
    return str(base / artifact.place.removeprefix("~/"))


def limit_of(disk_mb: int | None) -> int:
    """How many bytes of files one artifact may hold."""
    return (disk_mb or MAX_COPY_MB) << 20


async def initial_state(sandbox: Sandbox, task: Task) -> dict[str, Mapping[str, Entry]]:
    """The artifacts before the agent: absolute path -> what lies there."""
    return await state_of(sandbox, artifacts_of(task), limit_of(task.limits.disk_mb))


async def state_of(sandbox: Sandbox, artifacts: Sequence[Artifact], limit: int) -> dict[str, Mapping[str, Entry]]:
    """Some artifacts as they are now: absolute path -> what lies there. Each may hold `limit` bytes of files."""
    state: dict[str, Mapping[str, Entry]] = {}
    for artifact in artifacts:
        with tempfile.TemporaryFile() as archive:
            try:
                if await sandbox.pack(artifact.place, archive, limit + HEADERS, artifact.service):
                    archive.seek(0)
                    root = root_of(artifact, sandbox)
                    state[root] = (await asyncio.to_thread(unpack, archive, None, root, {}, limit)).entries
            except (TooMuch, TooMuchToCopy) as error:
                raise AttemptFailed("image", f"{error}; the set-up leaves too much to tell changes from it") from error
    return state
