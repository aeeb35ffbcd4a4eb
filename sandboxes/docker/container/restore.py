"""What a container has otherwise than its image, and putting it back: by the daemon, without a tool from inside.

So an agent that is root and has changed the shell cannot deceive it. Left out: what was added, and what is mounted.
"""

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from sandboxes.docker.daemon import DockerDaemon

REMOVED, ADDED = 2, 1
"""The daemon's marks of a path; what is left was changed. A directory is changed when anything in it is."""


async def changed(daemon: DockerDaemon, container: str) -> dict[str, bool]:
    """Paths of the image that were changed (False) or removed (True), the latter without what lay below them."""
    with daemon.translating_errors(f"the changes of {container}"):
        rows = await daemon.docker._query_json(f"containers/{container}/changes")  # aiodocker has no verb for it
    return {row["Path"]: row["Kind"] == REMOVED for row in rows or () if row["Kind"] != ADDED}


def _packed(archive: tarfile.TarFile) -> bytes:
    """An archive as it came; the client has opened it."""
    memory = archive.fileobj
    assert isinstance(memory, io.BytesIO)
    return memory.getvalue()


async def restore(daemon: DockerDaemon, container: str, labels: Mapping[str, str], paths: Sequence[str]) -> None:
    """Put these paths back as the image has them, directories with all that they hold."""
    with daemon.translating_errors(f"putting files of {container} back"):
        spoilt = daemon.container(container)
        image = (await spoilt.show())["Image"]
        whole = await daemon.docker.containers.create({"Image": image, "Cmd": ["true"], "Labels": dict(labels)})
        try:
            for path in sorted(paths):
                await spoilt.put_archive(str(PurePosixPath(path).parent), _packed(await whole.get_archive(path)))
        finally:
            await whole.delete(force=True, v=True)
