"""Whether a Docker daemon is there: notices that it has gone, that it hangs, and that it is back.

A stream of the daemon's events ends at the moment when the daemon does. A ping that gets no answer for SILENT_SECONDS
shows one that hangs. So whoever meets an error can ask whether the daemon was away, before an attempt is blamed for it,
and limits of time need not count what they could not see. Left out: a daemon that answers but does no work.
"""

import asyncio
import math
import time
from contextlib import suppress

import aiodocker
import aiohttp

from sandboxes.base import SandboxError

PAUSE_SECONDS = 2.0
"""Between two pings."""
SILENT_SECONDS = 30.0
"""A daemon that does not answer a ping for so long is away. One that is very busy answers within seconds."""
OUTAGE_SECONDS = 1800.0
"""How long work waits for a daemon to come back."""
QUIET = {"filters": '{"type": ["daemon"]}'}
"""Events that hardly ever happen: only the end of the stream matters."""


class Presence:
    """Watches one daemon, once `watch` was called. Until then it only answers what it is asked."""

    def __init__(self, docker: aiodocker.Docker, address: str):
        self._docker, self._address = docker, address
        self._left: float | None = None
        """When it went away, in time.monotonic(). None: it is there."""
        self._returned = -math.inf
        self._away_before = 0.0
        """Seconds of the absences that are over."""
        self._watching: asyncio.Task[None] | None = None

    @property
    def away(self) -> str:
        """A sentence while the daemon is away; empty while it is there."""
        if self._left is None:
            return ""
        return f"the Docker daemon at {self._address} has been away for {time.monotonic() - self._left:.0f} s"

    @property
    def away_seconds(self) -> float:
        """Seconds that it has been away since it is watched, all absences together."""
        return self._away_before + (0.0 if self._left is None else time.monotonic() - self._left)

    async def was_away(self, since: float) -> bool:
        """Return whether it was away at some time after `since` (time.monotonic()). It is asked now as well."""
        return not await self.answers() or self._returned > since

    async def until_there(self) -> None:
        """Return when it answers. SandboxError when it has been away for too long."""
        while not await self.answers():
            if self._left is not None and time.monotonic() - self._left > OUTAGE_SECONDS:
                raise SandboxError(f"{self.away}; start it")
            await asyncio.sleep(PAUSE_SECONDS)

    async def answers(self) -> bool:
        """Ask the daemon whether it is there."""
        asked = time.monotonic()
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                await self._docker._query_json("version", versioned_api=False)  # aiodocker has no verb for a ping
        except aiodocker.DockerError as error:
            if error.status == 900:  # aiodocker's own status for a failed connection (0.27)
                return self._leave(asked)
        except (aiohttp.ClientError, OSError, ValueError):  # ValueError: half an answer
            return self._leave(asked)
        if self._left is not None:
            self._away_before += time.monotonic() - self._left
            self._left, self._returned = None, time.monotonic()
        return True

    def _leave(self, when: float) -> bool:
        self._left = when if self._left is None else self._left
        return False

    def watch(self) -> None:
        """Notice absences from now on, until `close`."""
        self._watching = self._watching or asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        while True:
            listening = asyncio.create_task(self._listen())
            try:
                while not listening.done() and await self.answers():
                    await asyncio.wait({listening}, timeout=PAUSE_SECONDS)
                self._leave(time.monotonic())
            finally:
                listening.cancel()
                await asyncio.wait({listening})
            while not await self.answers():
                await asyncio.sleep(PAUSE_SECONDS)

    async def _listen(self) -> None:
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
        await asyncio.sleep(PAUSE_SECONDS / 10)  # a stream that always ends at once must not keep us busy
