"""The gateway as an aiohttp application: routes, access, start and stop.

Base URLs may have any prefix before /v1. /r/<key>/ in the prefix names the attempt, for tools that cannot set a key.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from proxy.call import CallError, internal_error
from proxy.config import ProxyConfig, engine_urls
from proxy.dialects import chat_completions, gemini
from proxy.dialects.base import CountingDialect, Dialect
from proxy.engine.moe_config import read_mixture
from proxy.engine.replicas.fleet import Fleet, Weights
from proxy.engine.replicas.run_needs import RunFacts
from proxy.handler import Handler, HandlerSettings
from proxy.http.admission import AdmissionGate, Capacity, FairThreads
from proxy.http.auth import Access
from proxy.http.connections import ADMINISTRATOR, ClientConnections, Places, open_file_limit
from proxy.http.error_pages import GatewayRunner, error_response
from proxy.http.limits import LIMITS, RequestLimits
from proxy.http.metrics import ProxyMetrics
from proxy.http.refused_keys import CODES, RefusedKeys, source_of
from proxy.http.routes import ANY_PREFIX, COUNTING, DIALECTS, MODEL, served_routes
from proxy.pool.audit import AuditLog
from proxy.pool.completions.store import CompletionWriter
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import PoolReadError, PoolWriteError, UserError
from proxy.pool.processes.deliveries import register_proxy
from proxy.pool.processes.owners import is_attended
from proxy.pool.rollouts.prompt_variations import PromptVariation
from proxy.pool.tokenizer_fingerprint import fingerprint
from proxy.pool.training.evaluations import evaluated_by
from proxy.pool.training.steps import current_names, newest, successor
from proxy.prompt.template import ChatTemplate
from proxy.recording.ongoing import OngoingAnswers
from proxy.recording.provider import SCHEME, Provider
from proxy.recording.recorder import RecordingServices
from proxy.recording.redelivery.ledger import DeliveryLedger
from proxy.recording.redelivery.service import Redelivery
from proxy.recording.sessions import Sessions
from proxy.recording.stored_routes import StoredRoutes

log = logging.getLogger(__name__)
SQL_THREADS = 4
"""Threads that run SQL."""
THREAD_CAPACITY = Capacity(total=4, per_run=3, per_attempt=2)
"""Threads that render, tokenise and parse. No run and no attempt may take all of them."""
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """The proxy's application: one model, the replicas that serve it, one pool."""

    def __init__(
        self,
        config: ProxyConfig,
        engine: str | tuple[str, ...],
        handler: Callable[..., Handler] = Handler,
        limits: RequestLimits = LIMITS,
    ):
        self.config = config
        self._limits = limits
        self._make_handler = handler
        self.clock: float | None = None
        """Unix time for the dates in chat templates; None: each attempt's beginning."""
        self.variation: PromptVariation | None = None
        """What models are shown otherwise than agents write it; None: as each attempt says."""
        self.for_sandboxes: dict[str, str] = {}
        """Addresses of the listeners for sandboxes, by kind; empty until they listen."""
        self.access = Access(config.proxy, limits.key_chars)
        self.model = Path(config.engine.model).name
        self.engines = engine_urls(engine)
        self.template = ChatTemplate(Path(config.engine.model), config.engine.tool_format)
        self.provider = _provider(config, self.engines[0])
        self.settings = handler_settings(config, self.template, limits)
        self.pool: Pool = open_pool(config.pool)
        places = Places.within(open_file_limit(), limits)
        self.admission = AdmissionGate(_capacity(config, limits, places))
        self.connections = ClientConnections(limits, places)
        self.metrics = ProxyMetrics(self.admission, lambda: self._writer.uncommitted, self.connections.cut)

    def app(self) -> web.Application:
        """Make the application. Its engine client, threads and pool writer live from its start to its clean-up."""
        app = web.Application(
            client_max_size=self._limits.body_bytes, middlewares=[self._errors, self._require_administrator]
        )
        open_routes = [*self._add_model_routes(app), app.router.add_get("/health", self._health)]
        self._open_to_agents = {route.resource for route in open_routes} | {None}  # None: an unknown path or method
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/end_calls", self._end_calls)
        app.router.add_get("/outage", self._outage)
        app.cleanup_ctx.append(self._lifetime)
        return app

    def sandbox_app(self) -> web.Application:
        """Make the application that sandboxes reach: the model routes only. It works while `app` is up."""
        app = web.Application(
            client_max_size=self._limits.body_bytes, middlewares=[self._errors, self._require_issued_key]
        )
        self._add_model_routes(app)
        return app

    def _add_model_routes(self, app: web.Application) -> list[web.AbstractRoute]:
        return [
            # What is asked most comes first: paths are compared one after the other.
            *(_add_post(app, path, self._complete_in(dialect)) for path, dialect in DIALECTS.items()),
            *(_add_post(app, path, self._count_in(dialect)) for path, dialect in COUNTING.items()),
            app.router.add_get(ANY_PREFIX + "models", self._models),
            app.router.add_get(ANY_PREFIX + MODEL, self._describe_model),
            app.router.add_get(ANY_PREFIX + "responses/{id}", self._retrieve),
            app.router.add_delete(ANY_PREFIX + "responses/{id}", self._delete),
            app.router.add_get(ANY_PREFIX + "responses/{id}/input_items", self._input_items),
        ]

    def fleet(self) -> Fleet | Provider:
        """Make the client of the engines. To be called inside the running event loop."""
        silence, published = self.config.engine.silence_seconds, partial(newest, self.pool)
        unattended = self._limits.unattended_seconds
        return self.provider or Fleet(self.engines, silence, published, self._successor, self._facts_of, unattended)

    def _successor(self, version: str) -> Weights | None:
        newer = successor(self.pool, version)
        return None if newer is None else Weights(newer.name, newer.hf_dir)

    def _facts_of(self, run_id: int, names: frozenset[str]) -> RunFacts:
        attended, evaluated = is_attended(self.pool, run_id), evaluated_by(self.pool, run_id)
        if evaluated is None:
            return RunFacts(*current_names(self.pool, run_id, names), attended)
        current = current_names(self.pool, evaluated.run_id, names)
        return RunFacts(*current, attended, evaluated.version, evaluated.engine.rstrip("/"))

    @web.middleware
    async def _require_administrator(self, request: web.Request, handler: Route) -> web.StreamResponse:
        """Require the admin key on every route except the open ones, so that a new route is closed by default."""
        if request.match_info.route.resource not in self._open_to_agents:
            self.access.check_administrator(request)
            self.connections.claim(request, ADMINISTRATOR)
            self._audit.note("admin_call", f"{request.method} {request.path} from {source_of(request)}")
        return await handler(request)

    @web.middleware
    async def _require_issued_key(self, request: web.Request, handler: Route) -> web.StreamResponse:
        """Require an issued key: unknown keys open no sessions here, even when the proxy listens on loopback."""
        self.access.check_issued(request)
        return await handler(request)

    def runner(self, shutdown_seconds: float) -> GatewayRunner:
        """Make the server of the application."""
        return GatewayRunner(self.app(), self._limits, self.connections, shutdown_seconds=shutdown_seconds)

    def sandbox_runner(self, shutdown_seconds: float) -> GatewayRunner:
        """Make the server for sandboxes. It uses what `runner` starts: set it up after that, clean it up before."""
        return GatewayRunner(self.sandbox_app(), self._limits, self.connections, shutdown_seconds=shutdown_seconds)

    async def _lifetime(self, _app: web.Application) -> AsyncIterator[None]:
        """Start what serves calls, and stop it in this order: calls, rows, deliveries, engines, threads, audit log,
        pool."""
        threads, workers = ThreadPoolExecutor(SQL_THREADS, "pool"), ThreadPoolExecutor(THREAD_CAPACITY.total, "work")
        work = FairThreads(workers, THREAD_CAPACITY)
        proxy_id = register_proxy(self.pool, fingerprint(Path(self.config.engine.model)))
        ledger = DeliveryLedger(proxy_id)
        audit = self._audit = AuditLog(self.pool)
        self._refused = RefusedKeys(self._limits, audit.note)
        writer = self._writer = CompletionWriter(self.pool, proxy_id, ledger.committed)
        redelivery = Redelivery(self.pool, ledger, threads)
        ongoing = self._ongoing = OngoingAnswers(redelivery, self._limits)
        background = (redelivery.keep_confirming(), self.connections.keep_watch(), ongoing.keep_watch())
        tasks = [asyncio.create_task(coroutine) for coroutine in background]
        self._engine = self.fleet()
        sessions = self._sessions = Sessions(
            self.pool,
            self.template,
            self.access,
            self.connections,
            threads=threads,
            work=work,
            limits=self._limits,
            clock=self.clock,
            variation=self.variation,
        )
        self._stored = StoredRoutes(sessions, threads)
        self._handler = self._make_handler(
            self.settings,
            self.template,
            RecordingServices(writer, redelivery, work),
            sessions=sessions,
            engine=self._engine,
            admission=self.admission,
            metrics=self.metrics,
            ongoing=ongoing,
        )
        yield
        for task in tasks:
            task.cancel()
        await ongoing.close()
        await writer.close()
        await redelivery.confirm()
        await self._engine.close()
        threads.shutdown()
        workers.shutdown()
        await asyncio.to_thread(audit.close)
        self.pool.close()

    @web.middleware
    async def _errors(self, request: web.Request, handler: Route) -> web.StreamResponse:
        """Answer every error in the format of the path's dialect. A bug is logged with its traceback."""
        try:
            return await handler(request)
        except CallError as error:
            problem = error
            if error.code in CODES:
                await self._refused.refused(request, error)
        except PoolWriteError as error:  # a session could not be opened; the recorder handles those of rows
            problem = CallError(507, "pool_write_failed", str(error))
        except PoolReadError as error:
            problem = CallError(503, "pool_unavailable", str(error))
        except web.HTTPException as error:
            code = "not_found" if error.status == 404 else "http_error"
            message = f"{request.method} {request.path}: {error.reason}; use one of {served_routes()}"
            problem = CallError(error.status, code, message)
        except ConnectionError:
            return web.Response(status=499)  # the client has gone
        except Exception:  # last resort: without an answer, a bug would look to the agent like a broken connection
            log.exception("bug while serving %s %s", request.method, request.path)
            problem = internal_error()
        self.metrics.failures[problem.code] += 1
        return error_response(request.path, problem)

    def _complete_in(self, dialect: Dialect) -> Route:
        async def complete(request: web.Request) -> web.StreamResponse:
            """Sample an answer and record it."""
            return await self._handler.complete(request, dialect)

        return complete

    def _count_in(self, dialect: CountingDialect) -> Route:
        async def count(request: web.Request) -> web.StreamResponse:
            """Count the tokens of a prompt."""
            return await self._handler.count(request, dialect)

        return count

    async def _models(self, request: web.Request) -> web.Response:
        """Name the model."""
        await self._sessions.admit(request)
        return web.json_response(chat_completions.models(self.model))

    async def _describe_model(self, request: web.Request) -> web.Response:
        """Describe the model by the name that the path gives it, as completions take any; to Google's clients as Google
        does."""
        await self._sessions.admit(request)
        name, prefix = request.match_info["model"], request.match_info["prefix"]
        if "x-goog-api-key" in request.headers or "key" in request.query or prefix.endswith("v1beta/"):
            most_sampled = self.config.sampling.max_new_tokens
            return web.json_response(gemini.model(name, self.settings.context_length, most_sampled))
        return web.json_response(chat_completions.model(name))

    async def _retrieve(self, request: web.Request) -> web.Response:
        """Give a stored response again."""
        return await self._stored.retrieve(request)

    async def _delete(self, request: web.Request) -> web.Response:
        """Delete a stored response for clients; the recorded call stays."""
        return await self._stored.delete(request)

    async def _input_items(self, request: web.Request) -> web.Response:
        """Give the input of a stored response."""
        return await self._stored.input_items(request)

    async def _metrics(self, _request: web.Request) -> web.Response:
        """Give the metrics, in Prometheus' text format."""
        return web.Response(text=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _end_calls(self, request: web.Request) -> web.Response:
        """End the calls of attempts whose agents have ended; answer when what they have sampled is recorded."""
        try:
            attempt_ids = msgspec.json.decode(await request.read(), type=set[int])
        except msgspec.DecodeError as error:
            message = f"the body is no list of attempts ({error}); send their ids, such as [1, 2]"
            raise CallError(400, "invalid_request", message) from error
        await self._ongoing.end(attempt_ids)
        return web.Response(status=204)

    async def _outage(self, request: web.Request) -> web.Response:
        """Answer which engines are away while none is up for a run, and how long an attempt's calls have waited."""
        try:
            run_id, attempt_id = (int(request.query.get(name, 0)) for name in ("run", "attempt"))
            seconds = self._engine.waited(attempt_id, float(request.query.get("within", 0)))
        except ValueError as error:
            message = f"run, attempt and within are numbers, not {request.query_string!r}; correct the query"
            raise CallError(400, "invalid_request", message) from error
        return web.json_response({"away": self._engine.away(run_id), "seconds": seconds})

    async def _health(self, request: web.Request) -> web.Response:
        """Answer everybody that the proxy is up, and the administrator with its model, engines and pool."""
        if not self.access.is_administrator(request):
            return web.json_response({"status": "ok"})
        if self.access.has_admin_key(request):
            self._audit.note("admin_call", f"GET /health from {source_of(request)}")
        asked = (replica.status() for replica in self._engine.replicas)
        healthy, replicas = await asyncio.gather(self._engine.healthy(), asyncio.gather(*asked))
        engine = {"url": ", ".join(self.engines), "ok": healthy}
        status: dict[str, object] = {"status": "ok", "model": self.model, "engine": engine}
        status["replicas"] = replicas
        status["model_directory"] = str(Path(self.config.engine.model).absolute())
        status["context_length"] = self.settings.context_length
        status["tool_formats"] = 1 if self.provider else self.template.tool_formats
        status["continued"] = dict(self.metrics.continued)
        if self.pool.url.startswith("sqlite"):
            names_pool = self.access.open_to_all  # clients of a proxy on loopback can open the same file
        else:
            names_pool = self.access.has_admin_key(request)  # the URL may hold a password, which agents must not get
        if names_pool:
            status["pool"] = self.pool.url
        status["sandboxes"] = self.for_sandboxes
        return web.json_response(status)


def _add_post(app: web.Application, path: str, route: Route) -> web.AbstractRoute:
    return app.router.add_post(ANY_PREFIX + path, route, expect_handler=_expect)


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Answer `Expect: 100-continue`; refuse other expectations in the dialect's error format."""
    expected = request.headers["Expect"]
    if expected.lower() != "100-continue":
        message = f"the request has Expect: {expected}, and only 100-continue is served; leave the header out"
        return error_response(request.path, CallError(417, "expectation_failed", message))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


def _provider(config: ProxyConfig, url: str) -> Provider | None:
    """The provider of an engine address litellm:PROVIDER/MODEL; None for other addresses."""
    if not url.startswith(SCHEME):
        return None
    if config.engine.routed_experts:
        raise UserError(f"engine.routed_experts is true, and {url} returns no experts; set it to false")
    return Provider(url, config.sampling.max_new_tokens, config.engine.silence_seconds)


def _capacity(config: ProxyConfig, limits: RequestLimits, places: Places) -> Capacity:
    """How many calls may be in flight: a run takes at most half of all, an attempt at most half of its run's."""
    total = config.proxy.max_calls
    per_run = max(1, total // 2)
    if places.attempts < total:
        log.warning(
            "this process may open %d files, which is enough for %d calls at once and not for proxy.max_calls = %d; "
            "raise its limit (ulimit -n)", open_file_limit(), places.attempts, total,
        )  # fmt: skip
    per_attempt = max(1, min(limits.attempt_calls, per_run // 2))
    return Capacity(total=min(total, places.attempts), per_run=per_run, per_attempt=per_attempt)


def handler_settings(config: ProxyConfig, template: ChatTemplate, limits: RequestLimits) -> HandlerSettings:
    """Return the handler's settings. UserError where the context length, or a mixture's experts, are not known."""
    length = config.engine.context_length or template.context_length
    if length is None:
        raise UserError(
            f"the context length is unknown, as the model names no max_position_embeddings ({config.engine.model}); "
            "set engine.context_length"
        )
    return HandlerSettings(
        config=config,
        limits=limits,
        context_length=length,
        mixture=read_mixture(Path(config.engine.model)) if config.engine.routed_experts else None,
    )
