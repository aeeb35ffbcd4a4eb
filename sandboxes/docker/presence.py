"""Whether a Docker daemon is there: notices that it has gone, that it hangs, and that it is back.

A stream of the daemon's events ends at the moment when the daemon does. A ping that gets no answer for SILENT_SECONDS
shows one that hangs. Left out: a daemon that answers but does no work.
"""

import asyncio
from contextlib import suppress

import aiodocker
import aiohttp

from sandboxes.clocks import Presence

SILENT_SECONDS = 30.0
"""A daemon that does not answer a ping for so long is away. One that is very busy answers within seconds."""
OUTAGE_SECONDS = 1800.0
"""How long work waits for a daemon to come back."""
QUIET = {"filters": '{"type": ["daemon"]}'}
"""Events that hardly ever happen: only the end of the stream matters."""


class DaemonPresence(Presence):
    """Watches one daemon."""

    def __init__(self, docker: aiodocker.Docker, address: str):
        super().__init__(f"the Docker daemon at {address}")
        self._docker = docker

    @property
    def patience(self) -> float:
        return OUTAGE_SECONDS

    async def ask(self) -> bool:
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                await self._docker._query_json("version", versioned_api=False)  # aiodocker has no verb for a ping
        except aiodocker.DockerError as error:
            return error.status != 900  # aiodocker's own status for a failed connection (0.27)
        except (aiohttp.ClientError, OSError, ValueError):  # ValueError: half an answer
            return False
        return True

    async def listen(self) -> None:
        """Return when the stream of events ends. Where the daemon has none for us, pings alone must tell."""
        endless = aiohttp.ClientTimeout(total=None, sock_read=None)
        with suppress(aiohttp.ClientError, OSError):
            try:
                async with self._docker._query("events", params=QUIET, timeout=endless) as response:
                    async for _ in response.content.iter_any():
                        pass
            except aiodocker.DockerError as error:
                if error.status != 900:
                    await asyncio.Event().wait()
