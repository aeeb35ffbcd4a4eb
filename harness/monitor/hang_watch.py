"""Whether an agent still lives: it prints something, or its model calls come to an end.

One that does neither for too long is ended as hung. Left out: what it does without a sound, so the patience must be
longer than the longest model call and the longest silent tool.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from harness.async_pool import AsyncPool
from harness.failure import AttemptFailed
from proxy.pool.rollouts.budgets import last_event
from sandboxes.base import Limits, Result, Sandbox


@dataclass
class HangWatch:
    """One attempt under watch."""

    pool: AsyncPool
    attempt_id: int
    patience: float
    """Seconds without any sign of life."""
    _heard: float = 0

    def hear(self, _output: bytes = b"") -> None:
        self._heard = time.time()

    async def silence(self) -> float:
        """Seconds since the last sign of life. The pool is asked only when the agent has been silent too long."""
        if time.time() - self._heard >= self.patience:
            self._heard = max(self._heard, await self.pool(last_event, self.attempt_id) or 0)
        return time.time() - self._heard


async def run_watched(
    sandbox: Sandbox, command: str, limits: Limits, env: Mapping[str, str], watched: HangWatch
) -> Result:
    """Run a command to its end. AttemptFailed("hung") when it showed no sign of life for too long."""
    watched.hear()
    running = asyncio.ensure_future(sandbox.run(command, limits, env, on_output=watched.hear))
    try:
        while True:
            left = watched.patience - await watched.silence()
            if left <= 0:
                break
            await asyncio.wait({running}, timeout=left)
            if running.done():
                return running.result()
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
    raise AttemptFailed("hung", f"no model call ended and nothing was printed for {watched.patience:g} s")
