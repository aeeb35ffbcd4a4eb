"""Limits of time that leave out what nobody could use: the absence of what the work needs, and time that is excused.

A `Presence` watches something that may be away: a Docker daemon, or every engine. So whoever meets an error can ask
whether it was away, before an attempt is blamed for it. Left out: how each of them is asked.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

from sandboxes.base import SandboxError

PAUSE_SECONDS = 2.0
"""Pause between two looks at whether it is there."""
LEAST_SECONDS = 1.0
"""Least pause between two looks at how much time is excused."""


async def time_up(
    seconds: float, excused: Callable[[], Awaitable[float]], clock: Callable[[], float] = time.monotonic
) -> None:
    """Return when so many seconds have passed that count. `excused` is asked whenever they may have."""
    end = clock() + seconds
    await asyncio.sleep(seconds)
    while (left := end + await excused() - clock()) > 0:
        await asyncio.sleep(max(left, LEAST_SECONDS))


class Presence(ABC):
    """Watches one thing, once `watch` was called. Until then it only answers what it is asked."""

    def __init__(self, name: str):
        self.name = name
        """Its name in sentences."""
        self._left: float | None = None
        """When it went away, in time.monotonic(). None: it is there."""
        self._returned = -math.inf
        self._away_before = 0.0
        """Seconds of the absences that are over."""
        self._watching: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def patience(self) -> float:
        """Seconds after which nobody waits for it any longer."""

    @abstractmethod
    async def ask(self) -> bool:
        """Ask whether it is there now."""

    async def listen(self) -> None:
        """Return when it may have gone. What cannot tell is asked from time to time."""
        await asyncio.Event().wait()

    @property
    def away(self) -> str:
        """A sentence while it is away; empty while it is there."""
        return "" if self._left is None else f"{self.name} has been away for {time.monotonic() - self._left:.0f} s"

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
            self.check()
            await asyncio.sleep(PAUSE_SECONDS)

    def check(self) -> None:
        """Raise SandboxError when it has been away for too long."""
        if self._left is not None and time.monotonic() - self._left > self.patience:
            raise SandboxError(f"{self.away}; start it")

    async def answers(self) -> bool:
        """Ask whether it is there, and take note."""
        asked = time.monotonic()
        while not await self.ask():
            if self._returned <= asked:
                return self._leave(asked)
            asked = time.monotonic()  # found back meanwhile: only one more look can tell an old failure from a new one
        if self._left is not None and self._left > asked:
            return False  # it has gone since, and only a later look can find it back
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
            finally:
                listening.cancel()
                await asyncio.wait({listening})
            while not await self.answers():
                await asyncio.sleep(PAUSE_SECONDS)

    async def _listen(self) -> None:
        await self.listen()
        # Noted before anything else is awaited: later, somebody may have seen it back, and it would be away once more.
        self._leave(time.monotonic())
        await asyncio.sleep(PAUSE_SECONDS / 10)  # where `listen` always returns at once, it must not keep us busy
