"""Retries: an answer that did not arrive is kept, and the next repeat of its request gets it, once.

A repeat is a retry only if the connection of the answer ended before its last event was flushed. Two live requests that
are the same, or a repeat after delivery, are new samples; so is the repeat of a call that was aborted while it sampled.
Of several repeats, at several proxies, one claims the answer in the pool and the others sample. Left out: a client that
vanished without closing its connection is believed to be there until TCP gives up.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import ParamSpec, TypeVar

import msgspec

from proxy.call import Call
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import Ledger
from proxy.pool.database import Pool
from proxy.pool.errors import PoolError
from proxy.pool.processes.deliveries import Missing, claim, confirm, mark_delivered, mark_undelivered, release
from proxy.prompt.splice import Prompt

log = logging.getLogger(__name__)
CONFIRM_SECONDS = 1.0
"""How long after its delivery a killed proxy's answer may still be in doubt."""
BEAT_SECONDS = 10

P = ParamSpec("P")
T = TypeVar("T")


def fingerprint(call: Call, prompt: Prompt) -> bytes:
    """Of what decides the answer, its length limit apart: 16 bytes, the same in every dialect and at every proxy.

    The prompt counts as the recorded path that it begins with and the text behind that.
    """
    ids, base = call.prompt if isinstance(call.prompt, tuple) else (), prompt.base.id if prompt.base else None
    form = call.constraint and (call.constraint.schema, call.constraint.calls, call.constraint.once)
    rest = msgspec.json.encode((ids, base, call.tools, call.stop, sorted(call.sampling.items()), form))
    state = blake2b(prompt.text.encode("utf-8", "surrogatepass"), digest_size=16)
    state.update(b"\0" + rest)
    return state.digest()


@dataclass
class Undelivered:
    """What of one attempt did not arrive, as far as this proxy knows: the pool decides."""

    missing: dict[int, Missing] = field(default_factory=dict)
    _leaving: dict[bytes, set[asyncio.Event]] = field(default_factory=dict)

    def learn(self, missing: list[Missing]) -> None:
        self.missing |= {item.completion_id: item for item in missing}

    @contextmanager
    def leaving(self, mark: bytes) -> Iterator[None]:
        """While the block lasts, an answer to this request is being committed for a client that has gone."""
        gone = asyncio.Event()
        self._leaving.setdefault(mark, set()).add(gone)
        try:
            yield
        finally:
            gone.set()
            self._leaving[mark].discard(gone)
            if not self._leaving[mark]:
                del self._leaving[mark]

    async def settled(self, mark: bytes) -> None:
        """Wait until nothing is leaving for this request."""
        for gone in list(self._leaving.get(mark, ())):
            await gone.wait()

    def candidates(self, mark: bytes, limit: int) -> list[int]:
        """Answers to this request that are what sampling up to this many tokens could have given."""
        return [
            item.completion_id
            for item in self.missing.values()
            if item.fingerprint == mark and item.sampled <= limit and (not item.cut or item.sampled == limit)
        ]


class Retries:
    """What this proxy does about answers that did not arrive. SQL runs in `threads`."""

    def __init__(self, pool: Pool, ledger: Ledger, threads: Executor):
        self._pool = pool
        self._ledger = ledger
        self._threads = threads

    async def keep(self) -> None:
        """Confirm in the pool what is settled, until cancelled."""
        written, at = (0, list[int]()), time.monotonic()
        while True:
            await asyncio.sleep(CONFIRM_SECONDS)
            state = self._ledger.state()
            if state != written or time.monotonic() - at > BEAT_SECONDS:
                await self.confirm()
                written, at = state, time.monotonic()

    async def confirm(self) -> None:
        await self._try(confirm, self._pool, self._ledger.proxy_id, *self._ledger.state())

    async def claim(self, known: Undelivered, mark: bytes, limit: int, follows: int | None) -> "Again | None":
        """The answer that this request is a retry of; None when it is none. What it follows has evidently arrived."""
        await known.settled(mark)
        if (had := known.missing.pop(follows or 0, None)) is not None:
            await self.arrived_late(had)
        for completion_id in known.candidates(mark, limit):
            missing = known.missing.pop(completion_id)  # from here on it is ours or somebody else's
            taken = asyncio.ensure_future(self._try(claim, self._pool, completion_id, self._ledger.proxy_id))
            try:
                recorded = await asyncio.shield(taken)
            except asyncio.CancelledError:
                if await taken is not None:
                    await self.give_back(known, missing)
                raise
            if recorded is not None:
                return Again(self, known, missing, recorded)
        return None

    async def give_back(self, known: Undelivered, missing: Missing) -> None:
        await self._try(release, self._pool, missing.completion_id, self._ledger.proxy_id)
        known.learn([missing])

    def arrived(self, completion_id: int) -> None:
        """An answer was delivered; nothing is written for it."""
        self._ledger.settled(completion_id)

    async def arrived_late(self, missing: Missing) -> None:
        """An answer that was marked has its client now."""
        await self._try(mark_delivered, self._pool, missing.completion_id)

    async def lost(self, known: Undelivered, missing: Missing) -> None:
        """The client went away before it had the end of this answer."""
        if await self._try(mark_undelivered, self._pool, missing.completion_id):
            self._ledger.settled(missing.completion_id)
            known.learn([missing])

    async def _try(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Run SQL in a thread. A failure costs a second sample or a row for training, not the call."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))
        except PoolError as error:
            log.warning("%s failed: %s", work.__name__, error)
            return None


@dataclass
class Again:
    """A recorded answer on its way to the client that asked for it again."""

    _retries: Retries
    _known: Undelivered
    _missing: Missing
    recorded: Completion

    async def arrived(self) -> None:
        await self._retries.arrived_late(self._missing)

    async def abandon(self) -> None:
        """This client has gone as well."""
        await self._retries.give_back(self._known, self._missing)
