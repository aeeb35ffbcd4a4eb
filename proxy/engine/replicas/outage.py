"""The times at which no engine is up, and how long the calls of each attempt have waited because of that.

The clocks of an attempt stand still while one of its calls is in progress and no engine is up; whoever keeps such a
clock asks here. Left out: who notices that an engine is away (replica.py, fleet.py).
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

KEPT_ATTEMPTS = 4096
"""Attempts whose waits are remembered; the one that began to wait the longest ago is forgotten first."""


class Outage:
    """Whether any engine is up, and who waits for one. It has no lock: only one event loop may use it."""

    def __init__(self) -> None:
        self._up = asyncio.Event()
        self._up.set()
        self._ended = -float("inf")
        self._calls: Counter[int] = Counter()
        """Calls in progress, by attempt."""
        self._waits: OrderedDict[int, list[list[float]]] = OrderedDict()
        """By attempt, the spans in which its calls waited, as [begin, end]; the end is infinite while they do."""

    @property
    def up(self) -> bool:
        return self._up.is_set()

    def note(self, up: bool) -> None:
        """Note whether any engine is up now."""
        if up and not self.up:
            self._up.set()
            self._ended = time.monotonic()
            for attempt_id in self._calls:
                self._end(attempt_id)
        elif self.up and not up:
            self._up.clear()
            for attempt_id in self._calls:
                self._begin(attempt_id)

    def was_down(self, since: float) -> bool:
        """Whether no engine was up at some time after `since` (time.monotonic())."""
        return not self.up or self._ended > since

    async def over(self) -> None:
        """Return when an engine is up."""
        await self._up.wait()

    @contextmanager
    def call(self, attempt_id: int) -> Iterator[None]:
        """A call of the attempt is in progress during the block."""
        self._calls[attempt_id] += 1
        if not self.up and self._calls[attempt_id] == 1:
            self._begin(attempt_id)
        try:
            yield
        finally:
            self._calls[attempt_id] -= 1
            if not self._calls[attempt_id]:
                del self._calls[attempt_id]
                if not self.up:
                    self._end(attempt_id)

    def seconds(self, attempt_id: int, within: float) -> float:
        """How many of the last `within` seconds the attempt's calls have waited while no engine was up."""
        now = time.monotonic()
        spans = self._waits.get(attempt_id, ())
        return sum(max(0.0, min(end, now) - max(begin, now - within)) for begin, end in spans)

    def _begin(self, attempt_id: int) -> None:
        self._waits.setdefault(attempt_id, []).append([time.monotonic(), float("inf")])
        self._waits.move_to_end(attempt_id)
        if len(self._waits) > KEPT_ATTEMPTS:
            self._waits.popitem(last=False)

    def _end(self, attempt_id: int) -> None:
        for span in self._waits.get(attempt_id, ())[-1:]:
            span[1] = time.monotonic()
