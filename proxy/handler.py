"""The request handler: one model call from the agent's request to the row in the pool and the reply.

Text leaves while it is sampled. What a client can act on (finish reason, tool calls, the final event) leaves after the
row is committed. A call that fails after tokens were sampled leaves a row too, marked untrainable with the reason.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from aiohttp import web

from proxy.call import Call, CallError, Overflow, Reply
from proxy.config import LimitsConfig
from proxy.dialects.base import Counting, Dialect
from proxy.engine.client import Ask, EngineError
from proxy.engine.fleet import Fleet, Route
from proxy.engine.replica import Origin
from proxy.limits import read_call
from proxy.metrics import Metrics
from proxy.pool.completions import CompletionWriter
from proxy.pool.deliveries import Missing
from proxy.pool.errors import AttemptClosed, PoolWriteError
from proxy.pool.records import ABANDONED, NewCompletion, int_bytes
from proxy.retries import Again, Retries, fingerprint
from proxy.sessions import Session, Sessions
from proxy.splice import Prompt
from proxy.template import ChatTemplate, TemplateError
from proxy.turn import Turn
from proxy.wire import Stream, Whole, Wire

TRAINING: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The distribution that logprobs are recorded for. Forced in every run; sessions outside of runs get what they ask."""

LONG = 4096
"""Tokens beyond which a call is streamed from the engine even when the agent does not stream."""

RESERVED = 8
"""Tokens of the context that SGLang keeps for itself: it refuses prompts that come closer to the end."""

TOO_LONG = ("maximum context length", "maximum allowed length", "model's context length")
"""How SGLang words that a prompt is too long for it, its KV cache included."""

STATUS = {"unreachable": 503, "busy": 503, "silent": 504, "refused": 400}
"""What a client is told of an engine's failure; 502 of any other. Never 429: codex gives up on its first one."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the handler takes from the configuration."""

    context_length: int
    max_new_tokens: int | None
    splice: bool
    keepalive_seconds: float
    limits: LimitsConfig


class Handler:
    """Serves model calls of every dialect. Rendering, tokenising and reading the pool happen in `threads`."""

    def __init__(
        self, settings: Settings, template: ChatTemplate, threads: ThreadPoolExecutor, *, sessions: Sessions,
        engine: Fleet, writer: CompletionWriter, retries: Retries, metrics: Metrics,
    ):  # fmt: skip
        self._settings = settings
        self._template = template
        self._threads = threads
        self._sessions = sessions
        self._engine = engine
        self._writer = writer
        self._retries = retries
        self._metrics = metrics

    async def complete(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        """One model call: authenticate, read, render, sample, record, reply."""
        started = time.time()
        session = await self._sessions.of(request)
        call = await read_call(request, dialect, self._settings.limits)
        prompt, mark = await self._render(session, call, dialect)
        turn = Turn(call, prompt, self._template)
        record = _Record(self._writer, self._retries, session, turn, mark, started)
        wire = self._wire(request, dialect, call, prompt)
        sent: _Record | Again = record
        try:
            again = await self._retries.claim(session.undelivered, mark, self._limit(turn), prompt.follows)
            if again is None:
                await self._sample(record, turn, wire)
                reply = turn.reply()
                await asyncio.shield(record.store(reply, _untrainable(session, turn)))
            else:
                self._metrics.served_again += 1
                sent, (pieces, reply) = again, turn.again(again.recorded)
                await wire.send(pieces)
            response = await wire.close(reply)
        except (EngineError, CallError) as error:
            return await self._fail(wire, await asyncio.shield(record.fail(error)))
        except (asyncio.CancelledError, ConnectionResetError):
            self._metrics.abandoned += 1
            await asyncio.shield(sent.abandon())
            raise
        finally:
            wire.rest()
        await sent.arrived()
        return response

    async def _fail(self, wire: Wire, problem: CallError) -> web.StreamResponse:
        if not wire.begun:
            raise problem
        self._metrics.failures[problem.code] += 1
        return await wire.fail(problem)

    def _wire(self, request: web.Request, dialect: Dialect, call: Call, prompt: Prompt) -> Wire:
        if call.stream:
            return Stream(request, call, dialect.Stream(call, len(prompt.ids)), self._settings.keepalive_seconds)
        return Whole(request, call, dialect)

    async def count(self, request: web.Request, dialect: Counting) -> web.Response:
        """How long the prompt of a request would be. Nothing is sampled or recorded."""
        session = await self._sessions.of(request)
        call = await read_call(request, dialect, self._settings.limits)
        prompt, _ = await self._render(session, call, dialect, any_length=True)
        return web.Response(body=dialect.count(len(prompt.ids)), content_type="application/json")

    async def _render(
        self, session: Session, call: Call, dialect: Dialect, any_length: bool = False
    ) -> tuple[Prompt, bytes]:
        """The prompt, and the fingerprint of the request."""
        loop = asyncio.get_running_loop()
        try:
            prompt, mark = await loop.run_in_executor(self._threads, self._prepared, session, call)
        except TemplateError as error:
            raise CallError(400, "invalid_request", str(error), dialect.PROMPT) from error
        limit, length = self._settings.context_length - RESERVED, len(prompt.ids)
        if length >= limit and not any_length:
            raise Overflow(length, limit, dialect.PROMPT)
        self._sessions.counted.update(() if any_length else prompt.counted)
        return prompt, mark

    def _prepared(self, session: Session, call: Call) -> tuple[Prompt, bytes]:
        prompt = session.prepare(call, self._settings.splice)
        return prompt, fingerprint(call, prompt)

    async def _sample(self, record: "_Record", turn: Turn, wire: Wire) -> None:
        """Sample the whole turn; anew on another replica when one fails before anything of it has left."""
        attempt = record.session.attempt
        route = self._engine.route(Origin(attempt.id, attempt.group_id, turn.prompt.prefix_length))
        while True:
            try:
                return await self._sample_at(route, record.session, turn, wire)
            except EngineError as error:
                if wire.told or not route.goes_on(error):
                    raise
                await asyncio.shield(record.lost(error))
                record.anew()

    async def _sample_at(self, route: Route, session: Session, turn: Turn, wire: Wire) -> None:
        """Sample the whole turn on one replica, sending what may leave early."""
        async with aclosing(self._tokens(route, session, turn)) as events:
            async for ids in events:
                await wire.send(turn.take(ids))
        turn.sampling.check()
        if turn.sampling.finish == "abort":
            raise EngineError("failed", "the engine aborted the call (paused or restarted?); send it again")
        await wire.send(turn.close())

    def _tokens(self, route: Route, session: Session, turn: Turn) -> AsyncGenerator[list[int], None]:
        call, limit = turn.call, self._limit(turn)
        params: dict[str, Any] = TRAINING | (call.sampling if session.attempt.purpose == "session" else {})
        params |= {"max_new_tokens": limit, "skip_special_tokens": False}
        params["stop_token_ids"] = list(self._template.ends)
        if call.stop:
            params |= {"stop": list(call.stop), "no_stop_trim": True}
        stream = call.stream or limit > LONG  # a long answer comes in events, so that a dead engine is noticed
        return route.sample(Ask(turn.prompt.written, len(turn.prompt.ids), params, stream), turn.sampling)

    def _limit(self, turn: Turn) -> int:
        """How many tokens the answer may have."""
        room = self._settings.context_length - RESERVED - len(turn.prompt.ids)
        limits = (turn.call.max_new_tokens, self._settings.max_new_tokens, room)
        return min(limit for limit in limits if limit is not None)


class _Record:
    """Stores one turn, at most once, and knows whether its client got it."""

    def __init__(
        self, writer: CompletionWriter, retries: Retries, session: Session, turn: Turn, mark: bytes, started: float
    ):
        self._writer = writer
        self._retries = retries
        self.session = session
        self._turn = turn
        self._mark = mark
        self._started = started
        self._id: int | None = None
        self._begun = False
        self._done = asyncio.Event()

    async def store(self, reply: Reply, untrainable: str | None, finish: str = "") -> None:
        """Return when the row is committed; CallError when it cannot be."""
        if self._begun:
            return
        self._begun = True
        item, path = self._row(reply, untrainable, finish)
        try:
            self._id = await self._writer.add(item)
        except AttemptClosed as error:
            raise CallError(401, "invalid_api_key", str(error)) from error
        except PoolWriteError as error:
            raise CallError(
                507, "pool_write_failed", f"the call was not recorded, so it is not answered: {error}"
            ) from error
        finally:
            self._done.set()
        self.session.add(self._id, item, path, self._turn.prompt)
        if finish:
            await self.arrived()  # not a whole answer: nobody waits for it

    async def arrived(self) -> None:
        """The last event has been flushed."""
        if self._id is not None:
            self._retries.arrived(self._id)

    async def abandon(self) -> None:
        """The client has gone. What was sampled is kept; a whole answer waits for a retry."""
        if not self._begun:
            with suppress(CallError):  # nobody is there to be told
                await self.store(self._turn.reply(), ABANDONED, "abort")
            return
        with self.session.undelivered.leaving(self._mark):
            await self._done.wait()
            if self._id is not None:
                sampling = self._turn.sampling
                missing = Missing(self._id, self._mark, len(sampling.ids), sampling.finish == "length")
                await self._retries.lost(self.session.undelivered, missing)

    async def fail(self, error: EngineError | CallError) -> CallError:
        """Keep what the engine sent before it failed, and return what the client is told."""
        if isinstance(error, CallError):
            return error
        try:
            await self.lost(error)
        except CallError as problem:
            return problem
        return _engine_problem(error)

    async def lost(self, error: EngineError) -> None:
        """Keep what the engine sent before it failed, as a row of its own: the turn may be sampled anew elsewhere."""
        if self._turn.sampling.ids:
            await self.store(self._turn.reply(), f"{error.kind}: {error}", "error")

    def anew(self) -> None:
        """What was sampled is stored; the turn begins again."""
        self._turn.restart()
        self._id, self._begun, self._done = None, False, asyncio.Event()

    def _row(self, reply: Reply, untrainable: str | None, finish: str) -> tuple[NewCompletion, "array[int]"]:
        prompt, sampling = self._turn.prompt, self._turn.sampling
        path = prompt.ids + sampling.ids
        item = NewCompletion(
            attempt_id=self.session.attempt.id,
            prefix_of=prompt.prefix_of,
            prefix_length=prompt.prefix_length,
            follows=prompt.follows,
            prompt_tail=prompt.ids[prompt.prefix_length :],
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
            fingerprint=self._mark,
        )
        return item, path


def _untrainable(session: Session, turn: Turn) -> str | None:
    """Why a turn that was sampled to its end cannot be trained on; None when it can."""
    sampled, known = len(turn.sampling.ids), 0
    for span in turn.sampling.versions:
        if span.start != known or span.end > sampled:
            break
        known = span.end
    if known != sampled:
        return f"the engine named the weight version of the first {known} of {sampled} tokens"
    asked = turn.call.sampling if session.attempt.purpose == "session" else {}
    other = {name: value for name, value in asked.items() if value != TRAINING[name]}
    return f"sampled with {other}, not from the training distribution" if other else None


def _engine_problem(error: EngineError) -> CallError:
    too_long = error.kind == "refused" and any(words in str(error) for words in TOO_LONG)
    code = "context_length_exceeded" if too_long else f"engine_{error.kind}"
    return CallError(STATUS.get(error.kind, 502), code, str(error))
