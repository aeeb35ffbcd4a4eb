"""Limits what runs at the same time, in all, per run and per attempt, and lets runs and attempts take turns.

Runs take turns, and the attempts within a run do, so that neither a run with many calls nor an attempt with slow ones
keeps the others waiting. A session outside of runs counts as a run of its own. The proxy has two such gates: one for
model calls in flight, which wait up to a deadline, and one for work in threads, which is short. Left out: priorities,
and what other proxies do.
"""

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from proxy.call import CallError
from proxy.pool.rollouts.attempts import Attempt

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K")
_Place = asyncio.Future[None]
RETRY_SECONDS = 5
"""Seconds after which a client that was refused should try again."""
LEAST_SECONDS = 1.0
"""Least pause between two looks at how much of a wait does not count."""
SMALL_TOKENS = 1024
"""Work on at most this many tokens runs on the event loop; a thread would cost more than it saves."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How many places there are."""

    total: int
    per_run: int
    per_attempt: int


class OwnShareTaken(CallError):
    """A call was refused because its own attempt has as many calls in flight as one may have.

    A client may bring this about whenever it likes, so it says nothing about the proxy.
    """


class AdmissionGate:
    """Hands out places in turn. It has no lock: only one event loop may use it."""

    def __init__(self, capacity: Capacity):
        self._capacity = capacity
        self.inside: Counter[str] = Counter()
        """Places taken, by run."""
        self.waiting: Counter[str] = Counter()
        """Calls that wait for a place, by run."""
        self._taken = 0
        self._of_attempt: Counter[int] = Counter()
        self._queues: OrderedDict[str, OrderedDict[int, deque[_Place]]] = OrderedDict()

    def place(
        self, attempt: Attempt, seconds: float | None = None, excused: Callable[[float], float] = lambda within: 0.0
    ) -> "_HeldPlace":
        """Hold a place while the block runs; CallError 429 when none is free within `seconds` (None: wait for ever).

        `excused(within)`: how many of the last `within` seconds do not count.
        """
        return _HeldPlace(self, attempt, seconds, excused)

    async def enter(self, run: str, attempt: int, seconds: float | None, excused: Callable[[float], float]) -> None:
        """Take a place, as `place` says."""
        if not self._queues and self._fits(run, attempt):
            self._take(run, attempt)
            return
        place: _Place = asyncio.get_running_loop().create_future()
        self._queues.setdefault(run, OrderedDict()).setdefault(attempt, deque()).append(place)
        self.waiting[run] += 1
        self._hand_out()
        try:
            await _granted(place, seconds, excused)
        except (TimeoutError, asyncio.CancelledError) as error:
            own_share_taken = self._of_attempt[attempt] >= self._capacity.per_attempt
            if not place.cancelled():  # the place was handed out at the same moment
                self.leave(run, attempt)
            if isinstance(error, TimeoutError):
                raise self._refusal(run, seconds or 0, own_share_taken) from error
            raise
        finally:
            _decrease(self.waiting, run)

    def leave(self, run: str, attempt: int) -> None:
        """Give a place back."""
        self._taken -= 1
        _decrease(self.inside, run)
        _decrease(self._of_attempt, attempt)
        self._hand_out()

    def _fits(self, run: str, attempt: int) -> bool:
        capacity = self._capacity
        own = self.inside.get(run, 0) < capacity.per_run and self._of_attempt.get(attempt, 0) < capacity.per_attempt
        return own and self._taken < capacity.total

    def _take(self, run: str, attempt: int) -> None:
        self._taken += 1
        self.inside[run] += 1
        self._of_attempt[attempt] += 1

    def _hand_out(self) -> None:
        while self._taken < self._capacity.total and (waiter := self._next()) is not None:
            run, attempt, place = waiter
            self._take(run, attempt)
            place.set_result(None)

    def _next(self) -> tuple[str, int, _Place] | None:
        """Take the next waiter that fits out of the queues, and move its run and attempt to the end of their queues."""
        for run, queues in list(self._queues.items()):
            if self.inside[run] >= self._capacity.per_run:
                continue
            for attempt, places in list(queues.items()):
                while places and places[0].done():  # the caller gave up
                    places.popleft()
                if not places:
                    del queues[attempt]
                elif self._of_attempt[attempt] < self._capacity.per_attempt:
                    queues.move_to_end(attempt)
                    self._queues.move_to_end(run)
                    return run, attempt, places.popleft()
            if not queues:
                del self._queues[run]
        return None

    def _refusal(self, run: str, seconds: float, own_share_taken: bool) -> CallError:
        calls = f"{run} has {self.inside[run]} calls in flight and {self.waiting[run]} waiting"
        again = f"not admitted within {seconds:g} s; try again in {RETRY_SECONDS}s"
        if own_share_taken:  # the code is the same: codex and others know this one
            message = f"{calls}, this attempt has as many as one may have, and this call was {again}, or send fewer"
            return OwnShareTaken(429, "rate_limit_exceeded", message)
        message = f"{calls}, and this call was {again}, run fewer agents, or raise the proxy's proxy.max_calls"
        return CallError(429, "rate_limit_exceeded", message)


class _HeldPlace:
    """A place while a block runs. A class, since every call goes through two: a generator costs twice as much."""

    def __init__(self, gate: AdmissionGate, attempt: Attempt, seconds: float | None, excused: Callable[[float], float]):
        self._gate, self._run, self._attempt = gate, run_label(attempt), attempt.id
        self._seconds, self._excused = seconds, excused

    async def __aenter__(self) -> None:
        await self._gate.enter(self._run, self._attempt, self._seconds, self._excused)

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave(self._run, self._attempt)


async def _granted(place: _Place, seconds: float | None, excused: Callable[[float], float]) -> None:
    """Wait for a place. TimeoutError when `seconds` have passed that count."""
    began, left = time.monotonic(), seconds
    try:
        while not (await asyncio.wait([place], timeout=left))[0]:
            waited = time.monotonic() - began
            left = (seconds or 0.0) + excused(waited) - waited
            if left <= 0:
                raise TimeoutError
            left = max(left, LEAST_SECONDS)
    finally:
        place.cancel()  # does nothing where it was handed out


class FairThreads:
    """Runs functions in threads, off the event loop; runs and attempts take turns."""

    def __init__(self, threads: Executor, capacity: Capacity):
        self._threads = threads
        self.gate = AdmissionGate(capacity)

    async def run(self, attempt: Attempt, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread. Its place stays taken until it ends, since a cancelled thread goes on."""
        async with self.gate.place(attempt):
            running = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise

    async def sized(self, size: int, attempt: Attempt, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function about `size` tokens: on the event loop up to SMALL_TOKENS, in a thread beyond."""
        return work(*args, **kwargs) if size <= SMALL_TOKENS else await self.run(attempt, work, *args, **kwargs)


def run_label(attempt: Attempt) -> str:
    """The run as metrics and messages name it; a session outside of runs has its own."""
    return f"session {attempt.id}" if attempt.run_id is None else f"run {attempt.run_id}"


def _decrease(counts: Counter[K], key: K) -> None:
    """Count one less, and forget a key that reaches zero, so that ended runs leave the metrics."""
    if counts[key] > 1:
        counts[key] -= 1
    else:
        counts.pop(key)
