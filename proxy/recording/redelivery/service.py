"""Serves an answer that did not arrive to the next repeat of its request, once.

A repeat counts as a retry only if the connection of the answer ended before its last event was flushed. Two identical
live requests, or a repeat after delivery, are new samples. Of several repeats, at several proxies, one claims the
answer in the pool and the others sample. Left out: an answer that is still being made, which a repeat takes over
elsewhere (proxy/recording/ongoing.py); and a client that vanished without closing its connection, which is believed to
be there until TCP gives up.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from proxy.pool.completions.records import Completion
from proxy.pool.database import Pool
from proxy.pool.errors import PoolError
from proxy.pool.processes import deliveries
from proxy.pool.processes.deliveries import UndeliveredAnswer
from proxy.pool.rollouts.attempts import closed_among
from proxy.recording.redelivery.ledger import DeliveryLedger
from proxy.recording.redelivery.waiting import WaitingAnswers

log = logging.getLogger(__name__)
CONFIRM_SECONDS = 1.0
"""How long after its delivery an answer may still count as undelivered if the proxy is killed."""
HEARTBEAT_SECONDS = 10
"""How often the state is written even if nothing changed, so that other proxies see that this one lives."""

P = ParamSpec("P")
T = TypeVar("T")


class Redelivery:
    """What this proxy does about answers that did not arrive. SQL runs in `threads`."""

    def __init__(self, pool: Pool, ledger: DeliveryLedger, threads: Executor):
        self._pool = pool
        self._ledger = ledger
        self._threads = threads

    async def keep_confirming(self) -> None:
        """Write the ledger's state to the pool whenever it changes, until cancelled."""
        written, written_at = (0, list[int]()), time.monotonic()
        while True:
            await asyncio.sleep(CONFIRM_SECONDS)
            state = self._ledger.state()
            due = state != written or time.monotonic() - written_at > HEARTBEAT_SECONDS
            if due and await self.confirm():
                written, written_at = state, time.monotonic()

    async def confirm(self) -> bool:
        """Write the ledger's state; return whether that succeeded."""
        return bool(await self._try(deliveries.confirm, self._pool, self._ledger.proxy_id, *self._ledger.state()))

    async def claim(
        self, waiting: WaitingAnswers, fingerprint: bytes, limit: int, arrived: int | None
    ) -> "RetriedAnswer | None":
        """Claim the answer that this request is a retry of; None when it is no retry, or another call was faster.

        `arrived`: the completion that the request repeats whole. The client has evidently received that one.
        """
        await waiting.wait_until_stored(fingerprint)
        if (received := waiting.by_id.pop(arrived or 0, None)) is not None:
            # it is no longer waiting, so the mark must go even if this client leaves now
            await asyncio.shield(asyncio.ensure_future(self.delivered_late(received)))
        for completion_id in waiting.candidates(fingerprint, limit):
            # taken before the await, so that no other call of this proxy tries it too
            if (answer := waiting.by_id.pop(completion_id, None)) is None:
                continue
            claim = self._try(deliveries.claim, self._pool, completion_id, self._ledger.proxy_id)
            claiming = asyncio.ensure_future(claim)
            try:
                recorded = await asyncio.shield(claiming)
            except asyncio.CancelledError:  # the claim may have been written all the same; then it is undone
                if await claiming is not None:
                    await self.give_back(waiting, answer)
                raise
            if recorded is not None:
                return RetriedAnswer(self, waiting, answer, recorded)
        return None

    async def give_back(self, waiting: WaitingAnswers, answer: UndeliveredAnswer) -> None:
        """Undo a claim, so that the next retry can have the answer."""
        await self._try(deliveries.release, self._pool, answer.completion_id, self._ledger.proxy_id)
        waiting.add([answer])

    def delivered(self, completion_id: int) -> None:
        """Note a delivered answer. Only undelivered ones are written, so this costs no SQL."""
        self._ledger.settled(completion_id)

    async def closed(self, attempt_ids: Collection[int]) -> Collection[int]:
        """Return those of these attempts that have ended; none when the pool cannot be read."""
        return await self._try(closed_among, self._pool, attempt_ids) or ()

    async def delivered_late(self, answer: UndeliveredAnswer) -> None:
        """Clear the mark of an answer that a retry has received."""
        await self._try(deliveries.mark_delivered, self._pool, answer.completion_id)

    async def undelivered(self, waiting: WaitingAnswers, answer: UndeliveredAnswer) -> None:
        """Mark an answer whose client left before its end. The ledger keeps it until the mark is written."""
        if await self._try(deliveries.mark_undelivered, self._pool, answer.completion_id):
            self._ledger.settled(answer.completion_id)
            waiting.add([answer])

    async def _try(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run SQL in a thread. A failure costs a second sample or a row for training, not the call."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))
        except PoolError as error:
            log.warning("%s failed: %s", work.__name__, error)
            return None


@dataclass
class RetriedAnswer:
    """A recorded answer on its way to the client that repeated its request."""

    _redelivery: Redelivery
    _waiting: WaitingAnswers
    _answer: UndeliveredAnswer
    recorded: Completion

    async def delivered(self) -> None:
        await self._redelivery.delivered_late(self._answer)

    async def abandon(self) -> None:
        """This client has gone as well: leave the answer to the next retry."""
        await self._redelivery.give_back(self._waiting, self._answer)
