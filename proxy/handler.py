"""The request handler: one model call from the agent's request to the row in the pool and the reply.

Text leaves while it is sampled. What a client can act on (finish reason, tool calls, the final event) leaves after the
row is committed. A call that fails after tokens were sampled leaves a row too, marked untrainable with the reason.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass

from aiohttp import web

from proxy.call import Call, CallError, ContextOverflow, Reply
from proxy.config import ProxyConfig
from proxy.dialects.base import CountingDialect, Dialect
from proxy.dialects.structured_output import grammar
from proxy.engine.client import RESERVED_TOKENS, EngineError, SamplingRequest
from proxy.engine.fleet import Fleet, Route
from proxy.engine.moe_config import Mixture
from proxy.engine.replica import Origin
from proxy.http.admission import AdmissionGate
from proxy.http.limits import RequestLimits, parse_call, read_body
from proxy.http.metrics import ProxyMetrics
from proxy.http.response import AnswerWriter, ResponseWriter, StreamedResponse, WholeResponse
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.prompt.splice import Prompt
from proxy.prompt.template import ChatTemplate, TemplateError
from proxy.recording.parallel_answers import Choice, abandoned, answered, arrived, failed
from proxy.recording.provider import Provider, ProviderRoute
from proxy.recording.recorder import Means, Record, Stored
from proxy.recording.redelivery.fingerprint import request_fingerprint
from proxy.recording.sessions import Session, Sessions
from proxy.recording.turn import Turn

log = logging.getLogger(__name__)

TRAINING_DISTRIBUTION: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The distribution that logprobs are recorded for. Forced in every run; sessions outside of runs get what they ask."""

LONG_ANSWER_TOKENS = 4096
"""Tokens beyond which a call is streamed from the engine even when the agent does not stream."""


@dataclass(frozen=True, kw_only=True)
class HandlerSettings:
    """The configuration, and what follows from it and the model's directory."""

    config: ProxyConfig
    limits: RequestLimits
    context_length: int
    turn: type[Turn] = Turn
    mixture: Mixture | None = None
    """Set: engines are asked which experts they chose, and calls of which they do not say it fail."""


class Handler:
    """Serves model calls of every dialect. Rendering, tokenising and other long work happen in threads."""

    def __init__(
        self, settings: HandlerSettings, template: ChatTemplate, means: Means, *, sessions: Sessions,
        engine: Fleet | Provider, admission: AdmissionGate, metrics: ProxyMetrics,
    ):  # fmt: skip
        self._settings = settings
        self._template = template
        self._means = means
        self._sessions = sessions
        self._engine = engine
        self._admission = admission
        self._metrics = metrics

    async def complete(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        """One model call: authenticate, read, render, sample, record, reply."""
        started = time.time()
        session = await self._sessions.of(request)
        call, prompt, fingerprint = await self._read(request, session, dialect)
        turns = [self._settings.turn(call, prompt, self._template) for _ in range(call.choices)]
        wire, stored = self._wire(request, dialect, call, prompt), Stored()
        choices = []
        for number, turn in enumerate(turns):
            record = Record(self._means, session, turn, stored, fingerprint=fingerprint, started=started)
            choices.append(Choice(record, turn, AnswerWriter(wire, number), record))
        try:
            response = await wire.close(await answered(choices, self._answer))
        except (EngineError, CallError):
            problem = await asyncio.shield(failed(choices))
            await self._sessions.note_trouble(session.attempt, problem)
            return await self._fail(wire, problem)
        except (asyncio.CancelledError, ConnectionResetError):
            self._metrics.abandoned += 1
            await asyncio.shield(abandoned(choices))
            raise
        except Exception:  # a bug; a client whose stream has begun would wait for its end
            with suppress(Exception):  # the bug may be in the way; it is logged either way
                await asyncio.shield(abandoned(choices))
            if not wire.begun:
                raise
            log.exception("bug in the stream of %s", request.path)
            return await self._fail(
                wire, CallError(500, "internal_error", "the proxy failed; its log has the traceback")
            )
        finally:
            wire.rest()
        await asyncio.shield(arrived(choices))  # clients may leave as soon as they have the end
        return response

    async def _answer(self, choice: Choice) -> Reply:
        """One answer, committed: sampled, or recorded before and not delivered."""
        record, turn = choice.record, choice.turn
        session = record.session
        limit, follows = self._limit(turn), turn.prompt.follows
        again = await self._means.redelivery.claim(session.waiting, record.fingerprint, limit, follows)
        if again is not None:
            self._metrics.served_again += 1
            choice.sent, (pieces, reply) = again, turn.again(again.recorded)
            await choice.lane.send(pieces)
            return reply
        await self._sessions.check_budget(session.attempt)
        async with self._admission.place(session.attempt, self._settings.limits.wait_seconds):
            await self._sample(record, turn, choice.lane)
        reply = turn.reply()
        await asyncio.shield(record.store(reply, _untrainable(session, turn)))
        return reply

    async def _fail(self, wire: ResponseWriter, problem: CallError) -> web.StreamResponse:
        if not wire.begun:
            raise problem
        self._metrics.failures[problem.code] += 1
        return await wire.fail(problem)

    def _wire(self, request: web.Request, dialect: Dialect, call: Call, prompt: Prompt) -> ResponseWriter:
        if call.stream:
            return StreamedResponse(
                request, call, dialect.events(call, len(prompt.ids)), self._settings.limits.keepalive_seconds
            )
        return WholeResponse(request, call, dialect)

    async def count(self, request: web.Request, dialect: CountingDialect) -> web.Response:
        """How long the prompt of a request would be. Nothing is sampled or recorded."""
        session = await self._sessions.of(request)
        _, prompt, _ = await self._read(request, session, dialect, any_length=True)
        return web.Response(body=dialect.count(len(prompt.ids)), content_type="application/json")

    async def _read(
        self, request: web.Request, session: Session, dialect: Dialect, any_length: bool = False
    ) -> tuple[Call, Prompt, bytes]:
        """The request, its prompt, and its fingerprint."""
        body = await read_body(request, self._settings.limits)
        try:
            found = await self._means.work.run(session.attempt, self._prepared, session, dialect, body, request.path_qs)
        except TemplateError as error:
            raise CallError(400, "invalid_request", str(error), dialect.PROMPT) from error
        prompt = found[1]
        limit, length = self._settings.context_length - RESERVED_TOKENS, len(prompt.ids)
        if length >= limit and not any_length:
            raise ContextOverflow(length, limit, dialect.PROMPT)
        self._metrics.continued.update(() if any_length else prompt.counted)
        return found

    def _prepared(self, session: Session, dialect: Dialect, body: bytes, path: str) -> tuple[Call, Prompt, bytes]:
        call = parse_call(body, path, dialect, self._settings.limits)
        prompt = session.prepare(call, self._settings.config.proxy.history == "splice")
        return call, prompt, request_fingerprint(call, prompt)

    async def _sample(self, record: Record, turn: Turn, wire: AnswerWriter) -> None:
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

    async def _sample_at(self, route: Route | ProviderRoute, session: Session, turn: Turn, wire: AnswerWriter) -> None:
        """Sample the whole turn on one replica, sending what may leave early."""
        async with aclosing(self._tokens(route, session, turn)) as events:
            async for ids in events:
                await wire.send(await self._means.work.sized(len(ids), session.attempt, turn.take, ids))
        turn.sampling.check()
        if (mixture := self._settings.mixture) is not None:
            start, length = turn.prompt.routed, len(turn.prompt.ids)
            size = length - start + len(turn.sampling.ids)
            await self._means.work.sized(size, session.attempt, turn.sampling.read_experts, length, start, mixture)
        await wire.send(await self._means.work.sized(len(turn.sampling.ids), session.attempt, turn.close))

    def _tokens(self, route: Route | ProviderRoute, session: Session, turn: Turn) -> AsyncGenerator[list[int], None]:
        call, limit = turn.call, self._limit(turn)
        request = SamplingRequest(
            prompt=turn.prompt.written,
            prompt_length=len(turn.prompt.ids),
            max_new_tokens=limit,
            distribution=TRAINING_DISTRIBUTION | (call.sampling if session.attempt.purpose == "session" else {}),
            end_ids=tuple(self._template.ends),
            stop=call.stop,
            grammar=grammar(call, self._template.form),
            stream=call.stream
            or limit > LONG_ANSWER_TOKENS,  # a long answer comes in events, so that a dead engine is noticed
            routed_from=None if self._settings.mixture is None else turn.prompt.routed,
        )
        return route.sample(request, turn.sampling)

    def _limit(self, turn: Turn) -> int:
        """How many tokens the answer may have."""
        room = self._settings.context_length - RESERVED_TOKENS - len(turn.prompt.ids)
        limits = (turn.call.max_new_tokens, self._settings.config.sampling.max_new_tokens, room)
        return min(limit for limit in limits if limit is not None)


def _untrainable(session: Session, turn: Turn) -> Untrained | None:
    """Why a turn that was sampled to its end cannot be trained on; None when it can."""
    if turn.untrainable is not None:
        return turn.untrainable
    sampled, known = len(turn.sampling.ids), 0
    for span in turn.sampling.versions:
        if span.start != known or span.end > sampled:
            break
        known = span.end
    if known != sampled:
        return Untrained(UntrainedReason.VERSION_MISSING, f"first {known} of {sampled} tokens")
    if turn.call.constraint is not None:
        return Untrained(UntrainedReason.CONSTRAINED)
    asked = turn.call.sampling if session.attempt.purpose == "session" else {}
    other = {name: value for name, value in asked.items() if value != TRAINING_DISTRIBUTION[name]}
    return Untrained(UntrainedReason.SAMPLING_PARAMETERS, str(other)) if other else None
