"""Ends an agent that hangs: one that prints nothing and completes no model call for too long.

Silent work cannot be seen, so the patience must be longer than the longest model call and the longest silent tool.
An agent also ends here soon after a call was refused because its turns or tokens are used up, or because it has left
the recorded attempt that it begins with: some would ask again for minutes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from harness.async_pool import AsyncPool
from harness.failure import AttemptFailed
from proxy.pool.rollouts.budgets import is_refused, last_event
from sandboxes.base import Limits, Result, Sandbox
from sandboxes.clocks import LEAST_SECONDS

REFUSED_SECONDS = 20.0
"""How often an agent with a budget is looked at. It has so long, and less than twice that, to end after a refusal."""


async def _nothing(_since: float) -> float:
    return 0.0


@dataclass
class HangWatch:
    """The signs of life of one attempt."""

    pool: AsyncPool
    attempt_id: int
    patience: float
    """Seconds without a sign of life after which the agent counts as hung."""
    away_seconds: Callable[[], float] = lambda: 0.0
    """Seconds so far in which no sign of life could come, because the daemon that runs the sandbox was away."""
    excused: Callable[[float], Awaitable[float]] = _nothing
    """Seconds after a moment (unix time) in which none could come, because no engine was up."""
    limited: bool = False
    """Whether its calls may be refused for good: they have a limit, or it begins with a recorded attempt."""
    _heard: float = 0
    _away_before: float = 0

    def hear(self, _output: bytes = b"") -> None:
        self._heard, self._away_before = time.time(), self.away_seconds()

    async def silence(self) -> float:
        """Seconds since the last sign of life. Only an agent that has been silent too long is looked up in the pool."""
        if time.time() - self._heard >= self.patience:
            last_call = await self.pool(last_event, self.attempt_id) or 0
            if last_call > self._heard:  # an outage before it is no part of the silence after it
                self._heard, self._away_before = last_call, self.away_seconds()
        silence = time.time() - self._heard - (self.away_seconds() - self._away_before)
        return silence if silence < self.patience else silence - await self.excused(self._heard)

    async def refused(self) -> bool:
        """Whether a call was refused for good."""
        return self.limited and await self.pool(is_refused, self.attempt_id)


async def run_watched(
    sandbox: Sandbox, command: str, limits: Limits, env: Mapping[str, str], watched: HangWatch
) -> Result:
    """Run a command to its end. AttemptFailed("hung") when it shows no sign of life for too long."""
    refused = False
    watched.hear()
    running = asyncio.ensure_future(sandbox.run(command, limits, env, on_output=watched.hear))
    try:
        while True:
            left = watched.patience - await watched.silence()
            if left <= 0:
                break
            await asyncio.wait({running}, timeout=max(min(left, REFUSED_SECONDS), LEAST_SECONDS))
            if running.done():
                return running.result()
            if refused:
                await sandbox.end_processes()
            refused = await watched.refused()
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
    raise AttemptFailed("hung", f"no model call ended and nothing was printed for {watched.patience:g} s")
