"""Who goes on when there is more to do than room: places in all, in one run and in one attempt, handed out in turn.

Runs take turns, and within a run its attempts do, so that neither a run that floods nor an attempt that is slow keeps
the others waiting. A session outside of runs counts as a run of its own. There are two such gates: model calls at work,
which wait up to a deadline, and work off the event loop, which is short. Left out: priorities, and other proxies.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
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
"""When a call that found no place may come again."""
SMALL_TOKENS = 1024
"""Tokens up to which work is cheaper on the event loop than on its way to a thread."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How many may be inside."""

    total: int
    per_run: int
    per_attempt: int


class AdmissionGate:
    """Use it in one event loop."""

    def __init__(self, room: Capacity):
        self._room = room
        self.inside: Counter[str] = Counter()
        """Places taken, by run."""
        self.waiting: Counter[str] = Counter()
        """Calls that have none yet, by run."""
        self._taken = 0
        self._of_attempt: Counter[int] = Counter()
        self._queues: OrderedDict[str, OrderedDict[int, deque[_Place]]] = OrderedDict()

    @asynccontextmanager
    async def place(self, attempt: Attempt, seconds: float | None = None) -> AsyncIterator[None]:
        """A place for as long as the block lasts; CallError 429 when there is none within `seconds`."""
        run = run_label(attempt)
        await self._enter(run, attempt.id, seconds)
        try:
            yield
        finally:
            self._leave(run, attempt.id)

    async def _enter(self, run: str, attempt: int, seconds: float | None) -> None:
        if not self._queues and self._fits(run, attempt):
            self._take(run, attempt)
            return
        place: _Place = asyncio.get_running_loop().create_future()
        self._queues.setdefault(run, OrderedDict()).setdefault(attempt, deque()).append(place)
        self.waiting[run] += 1
        self._hand_out()
        try:
            async with asyncio.timeout(seconds):
                await place
        except (TimeoutError, asyncio.CancelledError) as error:
            if not place.cancelled():  # it was handed out at the same moment
                self._leave(run, attempt)
            if isinstance(error, TimeoutError):
                raise self._refusal(run, seconds or 0) from error
            raise
        finally:
            _less(self.waiting, run)

    def _leave(self, run: str, attempt: int) -> None:
        self._taken -= 1
        _less(self.inside, run)
        _less(self._of_attempt, attempt)
        self._hand_out()

    def _fits(self, run: str, attempt: int) -> bool:
        room = self._room
        alone = self.inside[run] < room.per_run and self._of_attempt[attempt] < room.per_attempt
        return alone and self._taken < room.total

    def _take(self, run: str, attempt: int) -> None:
        self._taken += 1
        self.inside[run] += 1
        self._of_attempt[attempt] += 1

    def _hand_out(self) -> None:
        while self._taken < self._room.total and (found := self._next()) is not None:
            run, attempt, place = found
            self._take(run, attempt)
            place.set_result(None)

    def _next(self) -> tuple[str, int, _Place] | None:
        """The first who may enter, in turn. Who is served goes to the end of both queues."""
        for run, queues in list(self._queues.items()):
            if self.inside[run] >= self._room.per_run:
                continue
            for attempt, places in list(queues.items()):
                while places and places[0].done():  # given up
                    places.popleft()
                if not places:
                    del queues[attempt]
                elif self._of_attempt[attempt] < self._room.per_attempt:
                    queues.move_to_end(attempt)
                    self._queues.move_to_end(run)
                    return run, attempt, places.popleft()
            if not queues:
                del self._queues[run]
        return None

    def _refusal(self, run: str, seconds: float) -> CallError:
        message = (
            f"{run} has {self.inside[run]} calls at work and {self.waiting[run]} waiting, and this one found no place "
            f"within {seconds:g} s; try again in {RETRY_SECONDS}s, run fewer agents, or raise the proxy's [admission]"
        )
        return CallError(429, "rate_limit_exceeded", message)


class FairThreads:
    """Work off the event loop: in so many threads, in turn, and none of it for ever for the same attempt."""

    def __init__(self, threads: Executor, room: Capacity):
        self._threads = threads
        self.gate = AdmissionGate(room)

    async def run(self, attempt: Attempt, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread. Its place stays taken until it ends, even when the caller is cancelled."""
        async with self.gate.place(attempt):
            running = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise

    async def sized(self, size: int, attempt: Attempt, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The same for work that costs more than the way to a thread where it is about more than SMALL tokens."""
        return work(*args, **kwargs) if size <= SMALL_TOKENS else await self.run(attempt, work, *args, **kwargs)


def run_label(attempt: Attempt) -> str:
    return f"session {attempt.id}" if attempt.run_id is None else f"run {attempt.run_id}"


def _less(counts: Counter[K], key: K) -> None:
    """One less; what is at zero is forgotten."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
