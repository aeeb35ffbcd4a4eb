"""The row of one model call: stored once when everything is sampled, or with what there is when the call fails.

Left out: what the client is sent (proxy/http/response.py), and how an answer that did not arrive is found again
(proxy/recording/redelivery).
"""

import asyncio
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from zlib import crc32

from proxy.call import CallError, Reply
from proxy.dialects.structured_output import misfit
from proxy.engine.engine_call import EngineError
from proxy.http.admission import FairThreads
from proxy.pool.completions.records import REPETITION, NewCompletion, int_bytes
from proxy.pool.completions.routed_experts import known_after
from proxy.pool.completions.store import CompletionWriter
from proxy.pool.errors import AttemptClosed, PoolWriteError
from proxy.pool.processes.deliveries import UndeliveredAnswer
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.recording.observing import observed
from proxy.recording.redelivery.service import Redelivery
from proxy.recording.sessions import Session
from proxy.recording.turn import Turn

TOKENS_PER_SAMPLED = 64
"""Tokens of a path whose row costs as much work as one sampled token, by which the way to a thread is weighed."""
TOO_LONG = ("maximum context length", "maximum allowed length", "model's context length")
"""How SGLang 0.5.23 says that a prompt is too long for it, its KV cache included."""

STATUS = {"unreachable": 503, "busy": 503, "silent": 504}
"""HTTP status for a kind of engine failure; 502 for any other. Never 429: codex gives up on its first one."""


@dataclass(frozen=True)
class RecordingServices:
    """What every turn is recorded with."""

    writer: CompletionWriter
    redelivery: Redelivery
    work: FairThreads


@dataclass
class AnswerRows:
    """The rows of one request's answers. All have the same prompt; the first committed row holds it for the others."""

    first: int | None = None
    """The completion that holds the prompt."""
    experts_end: int = 0
    """How many tokens from the start of its path have recorded experts."""
    storing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a row is stored: the others can only point at the first one once it is committed."""


class TurnRecorder:
    """Stores one turn, at most once, and knows whether its client got it."""

    def __init__(
        self, services: RecordingServices, session: Session, turn: Turn, rows: AnswerRows, *, fingerprint: bytes,
        started: float,
    ):  # fmt: skip
        """`fingerprint`: of the request; `started`: when it came, unix time."""
        self._services = services
        self.session = session
        self._turn = turn
        self._rows = rows
        self.fingerprint = fingerprint
        self._started = started
        self.misfit: str | None = None
        """How the stored answer misses its prescribed form, as the row holds it."""
        self._id: int | None = None
        self._begun = False
        self._done = asyncio.Event()

    async def answer_again(self, turn: Turn, reply: Reply, completion_id: int | None = None) -> None:
        """Let later requests name a recorded answer also by the id that the repeat `turn` of its request gets."""
        completion_id = completion_id or self._id
        if turn.call.stored is not None and completion_id is not None:
            stored, work = self.session.stored, self._services.work
            await work.run(self.session.attempt, stored.answer_again, completion_id, turn.call.stored, reply)

    @property
    def begun(self) -> bool:
        """Whether the row is being stored, or is stored."""
        return self._begun

    async def store(self, reply: Reply, untrainable: Untrained | None, finish: str = "") -> None:
        """Return when the row is committed; CallError when it cannot be. `finish` replaces the reply's finish reason
        where the answer is not whole."""
        if self._begun:
            return
        self._begun = True
        prompt, sampled = self._turn.prompt, self._turn.sampling.ids
        work, attempt = self._services.work, self.session.attempt
        try:
            size = (len(prompt.ids) + len(sampled)) // TOKENS_PER_SAMPLED
            async with self._rows.storing:
                item, path = await work.sized(size, attempt, self._row, reply, untrainable, finish)
                self._id = await self._services.writer.add(item)
                if self._rows.first is None:
                    self._rows.first = self._id
                    self._rows.experts_end = known_after(item.experts, prompt.experts_end)
        except AttemptClosed as error:
            raise CallError(401, "invalid_api_key", str(error)) from error
        except PoolWriteError as error:
            raise CallError(
                507, "pool_write_failed", f"the call was not recorded, so it is not answered: {error}"
            ) from error
        finally:
            self._done.set()
        await work.sized(len(sampled), attempt, self.session.add, self._id, item, path, prompt)
        if self._turn.call.stored is not None and item.response is not None:
            await work.sized(
                len(sampled), attempt, self.session.stored.add, self._turn.call.stored, reply, item.response
            )
        if finish:
            self.delivered()  # not a whole answer: no retry can get it

    def delivered(self) -> None:
        """Note that the client has the whole answer."""
        if self._id is not None:
            self._services.redelivery.delivered(self._id)

    async def abandon(self) -> None:
        """Keep what was sampled for a client that has gone; a whole answer waits for a retry."""
        if not self._begun:
            with suppress(CallError):  # there is no client to tell
                await self.store(self._turn.reply(), Untrained(UntrainedReason.ABANDONED), "abort")
            return
        with self.session.waiting.storing(self.fingerprint):
            await self._done.wait()
            if self._id is not None:
                sampled, cut = len(self._turn.sampling.ids), self._turn.sampling.finish == "length"
                answer = UndeliveredAnswer(self._id, self.fingerprint, sampled, cut)
                await self._services.redelivery.undelivered(self.session.waiting, answer)

    async def fail(self, error: EngineError | CallError) -> CallError:
        """Keep what the engine sent before it failed, and return the error for the client."""
        if isinstance(error, CallError):
            return error
        try:
            await self.store_partial(error)
        except CallError as problem:
            return problem
        return engine_problem(error)

    async def store_partial(self, error: EngineError) -> None:
        """Keep what the engine sent before it failed as a row of its own; another replica may sample the turn again."""
        if self._turn.begun:
            reason = Untrained(UntrainedReason.ENGINE_FAILED, f"{error.kind}: {error}")
            await self.store(self._turn.reply(), reason, "error")

    def restart(self) -> None:
        """Begin the turn again; what was sampled before is stored."""
        self._turn.restart()
        self._id, self._begun, self._done = None, False, asyncio.Event()

    def _row(self, reply: Reply, untrainable: Untrained | None, finish: str) -> tuple[NewCompletion, "array[int]"]:
        prompt, sampling, request = self._turn.prompt, self._turn.sampling, self._turn.call.stored
        replayed = self._turn.replayed is not None and len(sampling.ids) > 0
        self.misfit = None if finish else misfit(self._turn.call, reply)
        path = prompt.ids + sampling.ids
        ended = REPETITION if sampling.finish == REPETITION else reply.finish_reason
        prefix_of, length = prompt.prefix_of, prompt.prefix_length
        experts = None if sampling.experts is None else sampling.experts.recorded
        if self._rows.first is not None:
            prefix_of, length = self._rows.first, len(prompt.ids)
            if experts is not None and self._rows.experts_end > experts.start:
                experts = experts.since(min(self._rows.experts_end, length, experts.end))
        item = NewCompletion(
            attempt_id=self.session.attempt.id,
            prefix_of=prefix_of,
            prefix_length=length,
            follows=prompt.follows,
            prompt_tail=prompt.ids[length:],
            sampled=sampling.ids,
            given=((0, len(sampling.ids)),) if replayed else sampling.given,
            logprobs=sampling.logprobs,
            versions=sampling.versions,
            finish_reason=finish or ended,
            untrainable=untrainable,
            reply=reply.message(),
            shape=prompt.shape,
            path_crc=crc32(int_bytes(path)),
            started_at=self._started,
            finished_at=time.time(),
            queued_seconds=sampling.queued_seconds,
            fingerprint=self.fingerprint,
            experts=experts,
            misfit=self.misfit,
            observed=observed(self._turn.call, reply, self._turn.template.form, self.session.view),
            response=self.session.stored.new(request, reply) if request is not None and not finish else None,
        )
        return item, path


def engine_problem(error: EngineError) -> CallError:
    """The client's error for a failed engine. opencode decides by the words "try again" whether it does."""
    if error.kind == "refused":
        too_long = any(words in str(error) for words in TOO_LONG)
        return CallError(400, "context_length_exceeded" if too_long else "engine_refused", str(error))
    return CallError(STATUS.get(error.kind, 502), f"engine_{error.kind}", f"{error}; try again in 1s")
