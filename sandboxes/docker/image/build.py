"""One build on a daemon, with a sandbox's limits of memory and CPUs and with a full network's restrictions.

Left out: a limit of processes, which the API does not offer for builds; their memory bounds them.
"""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import IO, Any

import aiohttp
from aiodocker.jsonstream import json_stream_stream

from sandboxes.base import Spec
from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.isolation.reach import Router

PERIOD = 100_000
"""Microseconds in which a build may use its CPUs' share."""


@dataclass(frozen=True)
class Build:
    """What the daemon is asked to build."""

    archive: IO[bytes]
    dockerfile: str
    """Its name in the archive."""
    tag: str
    labels: Mapping[str, str]
    spec: Spec
    """The sandbox that first needs the image."""

    async def run(self, daemon: DockerDaemon, router: Router | None) -> AsyncIterator[str]:
        """Build, and yield the log as it comes. SandboxError when it fails."""
        async with AsyncExitStack() as stack:
            network = "default" if router is None else await stack.enter_async_context(router.network())
            with daemon.translating_errors("building"):
                images = daemon.docker.images
                answer = daemon.docker._query(  # aiodocker's own verb takes neither limits nor a network
                    "build",
                    "POST",
                    params=self._parameters(network),
                    headers={"content-type": "application/x-tar", "Content-Encoding": "identity"},
                    data=images._stream(self.archive),
                    timeout=aiohttp.ClientTimeout(total=None),
                )
                response = await stack.enter_async_context(answer)
                stack.callback(response.close)  # releasing it would leave the daemon building what nobody waits for
                async for piece in json_stream_stream(response):
                    yield piece.get("stream", "")

    def _parameters(self, network: str) -> dict[str, Any]:
        given: dict[str, Any] = {"t": self.tag, "dockerfile": self.dockerfile, "labels": json.dumps(dict(self.labels))}
        given |= {"rm": "true", "forcerm": "true", "networkmode": network}
        if self.spec.memory_mb is not None:
            given |= {"memory": self.spec.memory_mb << 20, "memswap": self.spec.memory_mb << 20}
        if self.spec.cpus is not None:
            given |= {"cpuperiod": PERIOD, "cpuquota": int(self.spec.cpus * PERIOD)}
        return given
