"""What can be done with a service beside a sandbox once the agent has ended: run a command, and pack files.

Nothing of the agent runs in a service. Its commands run as the image's user, in the image's working directory.
"""

import asyncio
import time
from typing import IO

from sandboxes.base import Ended, Limits, Result, SandboxError
from sandboxes.docker.container import freezing
from sandboxes.docker.container.end_mark import EndMark
from sandboxes.docker.container.processes import COMMAND, MERGED
from sandboxes.docker.daemon import ContainerCommand, DaemonError, DockerDaemon
from sandboxes.output import BoundedOutput

NOT_RUN = -1
"""Exit code of a command that the service could not run: it has ended, or its image has no shell."""


async def run(daemon: DockerDaemon, container: str, command: str, limits: Limits) -> Result:
    """Run a shell command in a service. One that takes too long goes on until the service is halted."""
    output, began = BoundedOutput(limits.output_bytes), time.monotonic()
    mark = EndMark(output.add)

    def result(ended: Ended, code: int, cut: bool = False) -> Result:
        return Result(ended, code, output.text(cut), output.dropped, time.monotonic() - began, cut)

    inside = ContainerCommand(argv=("/bin/sh", "-c", MERGED, "sh"), user="", work="", env={COMMAND: command})
    try:
        async with asyncio.timeout(limits.seconds):
            code = await daemon.execute(container, mark.on(inside), mark.add)
            return result("exit", code, mark.end(code))
    except TimeoutError:
        return result("timeout", NOT_RUN)
    except DaemonError:
        raise
    except SandboxError:
        return result("exit", NOT_RUN)


async def pack(daemon: DockerDaemon, container: str, path: str, archive: IO[bytes], limit: int) -> bool:
    """Write what lies at an absolute path of a service as a tar archive, while its processes stand still."""
    await freezing.freeze(daemon, container, None)
    try:
        return await freezing.pack(daemon, container, path, path, archive, limit)
    finally:
        await freezing.thaw(daemon, container)
