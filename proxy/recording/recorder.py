"""The row of one model call: stored once what was sampled is all there, or as much as there is when the call fails.

Left out: what the client is sent (proxy/http/response.py), and how an answer that did not arrive is found again
(proxy/recording/redelivery).
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar
from zlib import crc32

from proxy.call import CallError, Reply
from proxy.engine.client import EngineError
from proxy.http.admission import FairThreads
from proxy.pool.completions.records import NewCompletion, int_bytes
from proxy.pool.completions.routed_experts import known_after
from proxy.pool.completions.store import CompletionWriter
from proxy.pool.errors import AttemptClosed, PoolWriteError
from proxy.pool.processes.deliveries import UndeliveredAnswer
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.recording.redelivery.service import Redelivery
from proxy.recording.sessions import Session
from proxy.recording.turn import Turn

P = ParamSpec("P")
T = TypeVar("T")
CHEAP = 64
"""Tokens of a path that cost as much as one that is sampled."""
TOO_LONG = ("maximum context length", "maximum allowed length", "model's context length")
"""How SGLang words that a prompt is too long for it, its KV cache included."""

STATUS = {"unreachable": 503, "busy": 503, "silent": 504}
"""What a client is told of an engine's failure; 502 of any other. Never 429: codex gives up on its first one."""


@dataclass(frozen=True)
class Means:
    """What every record is stored with."""

    writer: CompletionWriter
    redelivery: Redelivery
    work: FairThreads


@dataclass
class Stored:
    """The rows of one request's answers. They have the same prompt, which the first one of them holds for all."""

    first: int | None = None
    routed: int = 0
    """How many tokens of the first one's path have recorded experts."""
    turns: asyncio.Lock = field(default_factory=asyncio.Lock)


class Record:
    """Stores one turn, at most once, and knows whether its client got it."""

    def __init__(
        self, means: Means, session: Session, turn: Turn, stored: Stored, *, fingerprint: bytes, started: float
    ):  # fmt: skip
        """`fingerprint`: of the request; `started`: when it came, unix time."""
        self._means = means
        self.session = session
        self._turn = turn
        self._stored = stored
        self.fingerprint = fingerprint
        self._started = started
        self._id: int | None = None
        self._begun = False
        self._done = asyncio.Event()

    async def store(self, reply: Reply, untrainable: Untrained | None, finish: str = "") -> None:
        """Return when the row is committed; CallError when it cannot be."""
        if self._begun:
            return
        self._begun = True
        prompt, sampled = self._turn.prompt, self._turn.sampling.ids
        try:
            size = (len(prompt.ids) + len(sampled)) // CHEAP
            async with self._stored.turns:
                item, path = await self._sized(size, self._row, reply, untrainable, finish)
                self._id = await self._means.writer.add(item)
                if self._stored.first is None:
                    self._stored.first, self._stored.routed = self._id, known_after(item.experts, prompt.routed)
        except AttemptClosed as error:
            raise CallError(401, "invalid_api_key", str(error)) from error
        except PoolWriteError as error:
            raise CallError(
                507, "pool_write_failed", f"the call was not recorded, so it is not answered: {error}"
            ) from error
        finally:
            self._done.set()
        await self._sized(len(sampled), self.session.add, self._id, item, path, prompt)
        if finish:
            await self.delivered()  # not a whole answer: nobody waits for it

    async def delivered(self) -> None:
        """The last event has been flushed."""
        if self._id is not None:
            self._means.redelivery.delivered(self._id)

    async def abandon(self) -> None:
        """The client has gone. What was sampled is kept; a whole answer waits for a retry."""
        if not self._begun:
            with suppress(CallError):  # nobody is there to be told
                await self.store(self._turn.reply(), Untrained(UntrainedReason.ABANDONED), "abort")
            return
        with self.session.waiting.storing(self.fingerprint):
            await self._done.wait()
            if self._id is not None:
                sampled, cut = len(self._turn.sampling.ids), self._turn.sampling.finish == "length"
                answer = UndeliveredAnswer(self._id, self.fingerprint, sampled, cut)
                await self._means.redelivery.undelivered(self.session.waiting, answer)

    async def fail(self, error: EngineError | CallError) -> CallError:
        """Keep what the engine sent before it failed, and return what the client is told."""
        if isinstance(error, CallError):
            return error
        try:
            await self.lost(error)
        except CallError as problem:
            return problem
        return engine_problem(error)

    async def lost(self, error: EngineError) -> None:
        """Keep what the engine sent before it failed, as a row of its own: the turn may be sampled anew elsewhere."""
        if self._turn.begun:
            why = Untrained(UntrainedReason.ENGINE_FAILED, f"{error.kind}: {error}")
            await self.store(self._turn.reply(), why, "error")

    def anew(self) -> None:
        """What was sampled is stored; the turn begins again."""
        self._turn.restart()
        self._id, self._begun, self._done = None, False, asyncio.Event()

    async def _sized(self, size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._means.work.sized(size, self.session.attempt, work, *args, **kwargs)

    def _row(self, reply: Reply, untrainable: Untrained | None, finish: str) -> tuple[NewCompletion, "array[int]"]:
        prompt, sampling = self._turn.prompt, self._turn.sampling
        path = prompt.ids + sampling.ids
        of, length, experts = prompt.prefix_of, prompt.prefix_length, sampling.experts
        if self._stored.first is not None:
            of, length = self._stored.first, len(prompt.ids)
            if experts is not None and self._stored.routed > experts.start:
                experts = experts.since(min(self._stored.routed, length, experts.end))
        item = NewCompletion(
            attempt_id=self.session.attempt.id,
            prefix_of=of,
            prefix_length=length,
            follows=prompt.follows,
            prompt_tail=prompt.ids[length:],
            sampled=sampling.ids,
            logprobs=sampling.logprobs,
            versions=sampling.versions,
            finish_reason=finish or reply.finish_reason,
            untrainable=untrainable,
            reply=reply.message(),
            shape=prompt.shape,
            path_crc=crc32(int_bytes(path)),
            started_at=self._started,
            finished_at=time.time(),
            fingerprint=self.fingerprint,
            experts=experts,
        )
        return item, path


def engine_problem(error: EngineError) -> CallError:
    """What the client is told of a failed engine. opencode decides by the words whether it asks again."""
    if error.kind == "refused":
        too_long = any(words in str(error) for words in TOO_LONG)
        return CallError(400, "context_length_exceeded" if too_long else "engine_refused", str(error))
    return CallError(STATUS.get(error.kind, 502), f"engine_{error.kind}", f"{error}; try again in 1s")
