"""The times at which no engine is up for a run, and how long the calls of each attempt have waited because of that.

The clocks of an attempt stand still while one of its calls is in progress and no engine is up; whoever keeps such a
clock asks here. Left out: who notices that an engine is away (replica.py, fleet.py).
"""

import asyncio
import time
from collections import Counter, OrderedDict

KEPT_ATTEMPTS = 4096
"""Attempts whose waits are remembered; the one that began to wait the longest ago is forgotten first."""


class Outage:
    """Whether any engine is up, and who waits for one. It has no lock: only one event loop may use it."""

    def __init__(self) -> None:
        self.up = True
        self._ready = asyncio.Event()
        """Set while calls may be sent. An engine that is up and gets new weights is not ready for a moment."""
        self._ready.set()
        self._ended = -float("inf")
        self._calls: Counter[int] = Counter()
        """Calls in progress, by attempt."""
        self._waits: OrderedDict[int, list[list[float]]] = OrderedDict()
        """Per attempt, the spans in which its calls waited, as [begin, end]; the end is infinite while they do."""

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def busy(self) -> bool:
        """Whether any call is in progress."""
        return bool(self._calls)

    def note(self, up: bool, ready: bool) -> None:
        """Note whether any engine is up now, and whether any may be sent calls."""
        if ready:
            self._ready.set()
        else:
            self._ready.clear()
        if up and not self.up:
            self._ended = time.monotonic()
            for attempt_id in self._calls:
                self._end(attempt_id)
        elif self.up and not up:
            for attempt_id in self._calls:
                self._begin(attempt_id)
        self.up = up

    def was_down(self, since: float) -> bool:
        """Whether no engine was up at some time after `since` (time.monotonic())."""
        return not self.up or self._ended > since

    async def over(self) -> None:
        """Return when calls may be sent."""
        await self._ready.wait()

    def call(self, attempt_id: int) -> "_CallInProgress":
        """A call of the attempt is in progress during the block."""
        return _CallInProgress(self, attempt_id)

    def begun(self, attempt_id: int) -> None:
        """Note that a call of the attempt is in progress."""
        self._calls[attempt_id] += 1
        if not self.up and self._calls[attempt_id] == 1:
            self._begin(attempt_id)

    def ended(self, attempt_id: int) -> None:
        """Note that one of them is over."""
        if self._calls[attempt_id] > 1:
            self._calls[attempt_id] -= 1
            return
        self._calls.pop(attempt_id)
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


class _CallInProgress:
    """A class, since every call goes through it: a generator as context manager costs twice as much."""

    def __init__(self, outage: Outage, attempt_id: int):
        self._outage = outage
        self._attempt_id = attempt_id

    def __enter__(self) -> None:
        self._outage.begun(self._attempt_id)

    def __exit__(self, *_: object) -> None:
        self._outage.ended(self._attempt_id)
