"""Lists what a container changed of its image, and restores it, both by the daemon without any tool from inside.

So an agent that is root and has replaced the shell cannot deceive it. Left out: added files, and mounted ones.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import PurePosixPath

from sandboxes.base import SandboxError
from sandboxes.docker.container.freezing import download
from sandboxes.docker.daemon import DockerDaemon

MAX_PATHS = 5000
MAX_BYTES = 1 << 30
"""Of one path. A removed directory is one, whatever was in it."""
SECONDS = 120.0
"""An agent that is root can touch every file of its image. Restoring all of them took minutes of the daemon's time."""
REMOVED, ADDED = 2, 1
"""The daemon's codes; any other means changed. A directory counts as changed when anything in it is."""


async def changed(daemon: DockerDaemon, container: str) -> dict[str, bool]:
    """Return paths of the image that were changed (False) or removed (True; only the topmost path)."""
    async with _limited(f"listing the changes of {container}"):
        with daemon.translating_errors(f"the changes of {container}"):
            rows = await daemon.docker._query_json(f"containers/{container}/changes")  # aiodocker has no verb for it
    return {row["Path"]: row["Kind"] == REMOVED for row in rows or () if row["Kind"] != ADDED}


@asynccontextmanager
async def _limited(what: str) -> AsyncIterator[None]:
    """Give the block SECONDS. SandboxError when it takes longer."""
    limit = asyncio.timeout(SECONDS)
    try:
        async with limit:
            yield
    except (TimeoutError, SandboxError) as error:
        if limit.expired():
            raise SandboxError(f"{what} took more than {SECONDS:g} s") from error
        raise


async def restore(daemon: DockerDaemon, container: str, labels: Mapping[str, str], paths: Sequence[str]) -> None:
    """Restore these paths from the image, directories with all their content. SandboxError when they are too much."""
    if len(paths) > MAX_PATHS:
        raise SandboxError(f"{len(paths)} files of {container} were changed, and at most {MAX_PATHS} are restored")
    async with _limited(f"restoring files of {container}"):
        await _restore(daemon, container, labels, paths)


async def _restore(daemon: DockerDaemon, container: str, labels: Mapping[str, str], paths: Sequence[str]) -> None:
    with daemon.translating_errors(f"putting files of {container} back"):
        spoilt = daemon.container(container)
        image = (await spoilt.show())["Image"]
        whole = await daemon.docker.containers.create({"Image": image, "Cmd": ["true"], "Labels": dict(labels)})
        try:
            for path in sorted(paths):
                with tempfile.TemporaryFile() as archive:
                    try:
                        await download(daemon, whole.id, path, archive, MAX_BYTES)
                    except SandboxError as error:
                        why = f"{path} of {container} is not restored from its image ({error}); use a fresh sandbox"
                        raise SandboxError(why) from error
                    archive.seek(0)
                    await spoilt.put_archive(str(PurePosixPath(path).parent), archive)
        finally:
            await whole.delete(force=True, v=True)
