"""What the trainer of a run has reached, read from the pool: often while it moves, rarely while it does not."""

from time import monotonic

from harness.async_pool import AsyncPool
from proxy.pool.rollouts.runs import Admission, admission

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.2, 3.0
"""Seconds between two looks at the pool. They become rarer while nothing changes: an idle run costs next to nothing."""


class TrainerWatch:
    """One run's admission. All who wait in this process share its looks at the pool."""

    def __init__(self, pool: AsyncPool, run_id: int):
        self._pool = pool
        self._run_id = run_id
        self._known: Admission | None = None
        self._changed_at = self._next_at = monotonic()

    async def look(self) -> Admission:
        """Read the pool now."""
        known = await self._pool(admission, self._run_id)
        now = monotonic()
        if known != self._known:
            self._known, self._changed_at = known, now
        self._next_at = now + min(max(POLL_SECONDS, (now - self._changed_at) / 20), LONGEST_POLL_SECONDS)
        return known

    async def latest(self) -> Admission:
        """Return what was read last, or read the pool where another look is due."""
        if self._known is None or monotonic() >= self._next_at:
            self._next_at = monotonic() + POLL_SECONDS  # meanwhile the others make do with the last one
            return await self.look()
        return self._known

    def pause(self, longest: float = LONGEST_POLL_SECONDS) -> float:
        """Return how many seconds to wait before `latest` is worth asking again, at most `longest`."""
        return min(max(self._next_at - monotonic(), POLL_SECONDS), longest)
