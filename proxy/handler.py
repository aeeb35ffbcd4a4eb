"""The request handler: one model call from the agent's request to the row in the pool and the reply.

Between request and row, the call has five forms: `Call` (the request), `Prompt` (its tokens), `SamplingRequest` (what
the engine is asked), `Sampling` (what it sampled) and `Reply` (the answer, parsed).

Text leaves while it is sampled. What a client can act on (finish reason, tool calls, the final event) leaves after the
row is committed. A call that fails after tokens were sampled leaves a row, too, marked untrainable with the reason.
"""

import asyncio
import logging
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial

from aiohttp import web

from proxy.call import Call, CallError, ContextOverflow, Reply, internal_error
from proxy.config import ProxyConfig
from proxy.dialects.base import CountingDialect, Dialect
from proxy.dialects.structured_output import enforceable
from proxy.engine.engine_call import EngineError
from proxy.engine.moe_config import Mixture
from proxy.engine.replicas.fleet import Fleet
from proxy.engine.replicas.replica import Origin
from proxy.http.admission import AdmissionGate
from proxy.http.bodies import BodyBytes, HeldBody, read_body
from proxy.http.limits import RequestLimits, parse_call
from proxy.http.metrics import ProxyMetrics
from proxy.http.response import AnswerWriter, ResponseWriter, StreamedResponse, WholeResponse
from proxy.pool.completions.records import REPETITION
from proxy.pool.rollouts.attempts import Attempt
from proxy.prompt.splice import Prompt
from proxy.prompt.template import ChatTemplate, TemplateError
from proxy.recording.ongoing import OngoingAnswer, OngoingAnswers
from proxy.recording.parallel_answers import ParallelAnswer, abandon_all, all_delivered, answer_all, fail_all
from proxy.recording.provider import Provider, ProviderTurn
from proxy.recording.recorder import AnswerRows, RecordingServices, TurnRecorder
from proxy.recording.redelivery.fingerprint import request_fingerprint
from proxy.recording.sessions import Session, Sessions
from proxy.recording.turn import Turn
from proxy.replay.beginnings import Beginnings
from proxy.sampling import answer_limit, sampling_request, why_untrained, without_effect

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HandlerSettings:
    """The configuration, and what follows from it and the model's directory."""

    config: ProxyConfig
    limits: RequestLimits
    context_length: int
    mixture: Mixture | None = None
    """Set for a mixture of experts: engines must return the chosen experts; a call without them fails."""


class Handler:
    """Serves model calls of every dialect. Rendering, tokenising and other long work run in threads."""

    def __init__(
        self, settings: HandlerSettings, template: ChatTemplate, services: RecordingServices, *, sessions: Sessions,
        engine: Fleet | Provider, admission: AdmissionGate, metrics: ProxyMetrics, ongoing: OngoingAnswers,
    ):  # fmt: skip
        self._settings = settings
        self._template = template
        self._services = services
        self._sessions = sessions
        self._engine = engine
        self._admission = admission
        self._metrics = metrics
        self._ongoing = ongoing
        self._beginnings = Beginnings(template, services.work)
        self._bodies = BodyBytes(settings.limits)

    async def complete(self, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        """Serve one model call."""
        started = time.time()
        session = await self._sessions.of(request)
        with self._bodies.held(session.attempt.id) as body:
            return await self._complete(request, session, dialect, body, started)

    async def _complete(
        self, request: web.Request, session: Session, dialect: Dialect, body: HeldBody, started: float
    ) -> web.StreamResponse:
        """Parse and render the request, then for each answer admit the call, sample, parse and record; at last send
        the end of the response."""
        call, prompt, fingerprint = await self._read(request, session, dialect, body)
        response = self._open_response(request, dialect, call, prompt)
        answers, rows = [], AnswerRows()
        for number in range(call.choices):
            turn = self._turn(call, prompt, session)
            recorder = TurnRecorder(self._services, session, turn, rows, fingerprint=fingerprint, started=started)
            answers.append(ParallelAnswer(recorder, turn, AnswerWriter(response, number), body))
        try:
            replies = await answer_all(answers, self._answer)
            result = await response.close([session.view.told(reply) for reply in replies])
        except (EngineError, CallError):
            error = await asyncio.shield(fail_all(answers))
            await self._sessions.note_trouble(session.attempt, error, started)
            return await self._fail(response, error)
        except (asyncio.CancelledError, ConnectionError):  # the client went away
            self._metrics.abandoned += 1
            await asyncio.shield(abandon_all(answers))
            raise
        except Exception:  # a bug: without an error event, the client of a stream would wait for the end
            with suppress(Exception):  # keeping the rows may meet the same bug; it is logged in either case
                await asyncio.shield(abandon_all(answers))
            if not response.headers_sent:
                raise
            log.exception("bug in the stream of %s", request.path)
            return await self._fail(response, internal_error())
        finally:
            response.stop_keepalive()
        self._metrics.answered[dialect.NAME] += 1
        await all_delivered(answers)
        return result

    async def count(self, request: web.Request, dialect: CountingDialect) -> web.Response:
        """Answer how many tokens the prompt of a request has. Nothing is sampled or recorded."""
        session = await self._sessions.of(request)
        with self._bodies.held(session.attempt.id) as body:
            _, prompt, _ = await self._read(request, session, dialect, body, any_length=True)
        return web.Response(body=dialect.count(len(prompt.ids)), content_type="application/json")

    async def _read(
        self, request: web.Request, session: Session, dialect: Dialect, held_body: HeldBody, any_length: bool = False
    ) -> tuple[Call, Prompt, bytes]:
        """Parse the request, render its prompt (spliced from recorded tokens) and fingerprint it for retries."""
        body = await read_body(request, self._settings.limits, held_body)

        def in_thread() -> tuple[Call, Prompt, bytes]:
            call = parse_call(body, request.path_qs, dialect, self._settings.limits, session.reader(dialect))
            remember = not any_length  # else counting alone would take memory
            call = session.shown(call, remember)
            if call.constraint is not None and self._settings.config.proxy.prescribed == "grammar":
                call = replace(call, constraint=replace(call.constraint, enforced=enforceable(call)))
            ignored = self._without_effect(call, session.attempt)
            call = call if ignored == call.ignored else replace(call, ignored=ignored)
            splice = self._settings.config.proxy.history == "splice"
            prompt = session.prepare(call, splice, remember)
            return call, prompt, request_fingerprint(call, prompt)

        try:
            call, prompt, fingerprint = await self._services.work.run(session.attempt, in_thread)
        except TemplateError as error:
            raise CallError(400, "invalid_request", str(error), dialect.PROMPT) from error
        held_body.rendered()
        if not any_length:
            limit, length = self._context_length, len(prompt.ids)
            if length >= limit:
                raise ContextOverflow(length, limit, dialect.PROMPT)
            self._metrics.continued.update(prompt.counted)
        return call, prompt, fingerprint

    def _without_effect(self, call: Call, attempt: Attempt) -> tuple[str, ...]:
        if isinstance(self._engine, Provider):
            return self._engine.without_effect(call)
        return without_effect(call, attempt, self._template)

    def _open_response(self, request: web.Request, dialect: Dialect, call: Call, prompt: Prompt) -> ResponseWriter:
        if call.stream:
            events = dialect.events(call, len(prompt.ids))
            return StreamedResponse(request, call, events, self._settings.limits.keepalive_seconds)
        return WholeResponse(request, call, dialect, self._settings.limits.keepalive_seconds)

    async def _answer(self, answer: ParallelAnswer) -> Reply:
        """Return one answer once it is committed. A retry gets the one whose client has gone, made or recorded; any
        other request a new one."""
        recorder, turn = answer.recorder, answer.turn
        session, fingerprint, limit = recorder.session, recorder.fingerprint, self._limit(turn)
        ongoing = self._ongoing.take_over(session.attempt.id, fingerprint, limit)
        if ongoing is None:
            arrived = None if turn.prompt.partly else turn.prompt.follows
            retried = await self._services.redelivery.claim(session.waiting, fingerprint, limit, arrived)
            if retried is not None:
                self._metrics.served_again += 1
                answer.sent, (pieces, reply) = retried, turn.from_record(retried.recorded)
                await answer.writer.send(pieces)
                await recorder.answer_again(turn, reply, retried.recorded.id)
                return reply
            ongoing = self._ongoing.begin(recorder, turn, limit, self._make)
            answer.body.keep_until(ongoing.task)
        else:
            self._metrics.served_again += 1
        answer.sent = ongoing
        reply = await ongoing.sent_to(answer.writer)
        if ongoing.turn is not turn:
            await ongoing.recorder.answer_again(turn, reply)
        return reply

    async def _make(self, answer: OngoingAnswer) -> Reply:
        """Sample one answer and return it once it is committed."""
        recorder, turn, attempt = answer.recorder, answer.turn, answer.recorder.session.attempt
        await self._sessions.check_budget(attempt)
        if not await self._beginnings.play(answer):
            outage = self._engine.outage_of(attempt.run_id)
            with outage.call(attempt.id):
                excused = partial(outage.seconds, attempt.id)
                asked = time.monotonic()
                async with self._admission.place(attempt, self._settings.limits.wait_seconds, excused):
                    turn.sampling.queued(asked)
                    await self._sample(answer)
        reply = turn.reply()
        self._metrics.repeated += turn.sampling.finish == REPETITION
        # Shielded: an answer whose time without a client is over must still be stored whole, for a retry.
        await asyncio.shield(recorder.store(reply, why_untrained(turn, attempt)))
        if recorder.misfit and turn.call.constraint:
            self._metrics.unfit["schema" if turn.call.constraint.calls is None else "call"] += 1
        return reply

    def _turn(self, call: Call, prompt: Prompt, session: Session) -> Turn:
        if isinstance(self._engine, Provider):
            return ProviderTurn(call, prompt, self._template, provider=self._engine)
        attempt = session.attempt
        origin = Origin(attempt.id, attempt.group_id, prompt.prefix_length, attempt.run_id)
        return Turn(call, prompt, self._template, self._engine.route(origin), self._settings.mixture)

    async def _sample(self, answer: OngoingAnswer) -> None:
        """Sample the whole turn. When a replica fails before the client has any text, sample on another one."""
        turn, work, attempt = answer.turn, self._services.work, answer.recorder.session.attempt
        request = sampling_request(turn, attempt, self._template, self._limit(turn))
        while True:
            try:
                async with aclosing(turn.stream(request, work, attempt)) as stream:
                    async for pieces in stream:
                        await answer.send(pieces)
                return
            except EngineError as error:
                if answer.started or not turn.may_move(error):
                    raise
                await answer.restart(error)

    def _limit(self, turn: Turn) -> int:
        return answer_limit(turn, self._context_length, self._settings.config.sampling.max_new_tokens)

    @property
    def _context_length(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        return self._settings.context_length - self._engine.reserved_tokens

    async def _fail(self, response: ResponseWriter, error: CallError) -> web.StreamResponse:
        """Send the error inside a stream that has begun; raise it otherwise, for an error response."""
        if not response.headers_sent:
            raise error
        self._metrics.failures[error.code] += 1
        return await response.fail(error)
