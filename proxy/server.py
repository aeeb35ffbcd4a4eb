"""The gateway as an aiohttp application: routes, error forms, start and stop.

Base URLs may have any prefix before /v1, and /r/<key>/ in it names the attempt for tools that cannot set a key.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from proxy.call import CallError, internal_error
from proxy.config import ProxyConfig, engine_urls
from proxy.dialects import anthropic, chat_completions, gemini, responses, text_completions
from proxy.dialects.base import CountingDialect, Dialect
from proxy.engine.fleet import Fleet
from proxy.engine.moe_config import read_mixture
from proxy.handler import Handler, HandlerSettings
from proxy.http.admission import RETRY_SECONDS, AdmissionGate, Capacity, FairThreads
from proxy.http.auth import Access
from proxy.http.error_pages import GatewayRunner
from proxy.http.limits import LIMITS, RequestLimits
from proxy.http.metrics import ProxyMetrics
from proxy.pool.completions.store import CompletionWriter
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import PoolReadError, PoolWriteError, UserError
from proxy.pool.processes.deliveries import register_proxy
from proxy.pool.tokenizer_fingerprint import fingerprint
from proxy.pool.training.steps import newest
from proxy.prompt.template import ChatTemplate
from proxy.recording.provider import SCHEME, Provider, TextTurn
from proxy.recording.recorder import Means
from proxy.recording.redelivery.ledger import DeliveryLedger
from proxy.recording.redelivery.service import Redelivery
from proxy.recording.sessions import Sessions
from proxy.recording.turn import Turn

log = logging.getLogger(__name__)
SQL_THREADS = 4
"""That run SQL."""
THREAD_CAPACITY = Capacity(total=4, per_run=3, per_attempt=2)
"""Threads that render, tokenise and parse: one run, and one attempt, always leaves some to the others."""
ANY_PREFIX = r"/{prefix:(?:.*/)?}"
DIALECTS: dict[str, Dialect] = {
    "chat/completions": chat_completions,
    "messages": anthropic,
    "responses": responses,
    "completions": text_completions,
    "models/{model:.+}:generateContent": gemini,
    "models/{model:.+}:streamGenerateContent": gemini,
}
"""Path below the base URL -> dialect; the first that fits a path is taken."""
COUNTING: dict[str, CountingDialect] = {"messages/count_tokens": anthropic, "models/{model:.+}:countTokens": gemini}


Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """The proxy: one model, the replicas that serve it, one pool."""

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
        self.for_sandboxes: dict[str, str] = {}  # their listeners, once they listen
        self.access = Access(config.proxy, limits.key_chars)
        self.model = Path(config.engine.model).name
        self.engines = engine_urls(engine)
        self.template = ChatTemplate(Path(config.engine.model), config.engine.tool_format)
        self.provider = _provider(config, self.engines[0])
        self.settings = _settings(config, self.template, TextTurn if self.provider else Turn, limits)
        self.pool: Pool = open_pool(config.pool)
        room = config.admission
        calls = Capacity(total=room.calls, per_run=room.calls_per_run, per_attempt=room.calls_per_run)
        self.admission = AdmissionGate(calls)
        self.metrics = ProxyMetrics(self.admission, lambda: self._writer.uncommitted)

    def app(self) -> web.Application:
        """The application; its engine client and writer live as long as it runs."""
        app = web.Application(client_max_size=self._limits.body_bytes, middlewares=[self._errors, self._guard])
        open_to_agents = [app.router.add_get("/health", self._health), *self._add_model_routes(app)]
        self._open = {route.resource for route in open_to_agents} | {None}  # None: no such path, or not this method
        app.router.add_get("/metrics", self._metrics)
        app.cleanup_ctx.append(self._live)
        return app

    def sandbox_app(self) -> web.Application:
        """What sandboxes may reach: the model routes. It works while the application itself is up."""
        app = web.Application(
            client_max_size=self._limits.body_bytes, middlewares=[self._errors, self._issued_keys_only]
        )
        self._add_model_routes(app)
        return app

    def _add_model_routes(self, app: web.Application) -> list[web.AbstractRoute]:
        return [
            app.router.add_get(ANY_PREFIX + "models", self._models),
            *(_add_post(app, path, self._completing(dialect)) for path, dialect in DIALECTS.items()),
            *(_add_post(app, path, self._counting(dialect)) for path, dialect in COUNTING.items()),
        ]

    def fleet(self) -> Fleet | Provider:
        """The engine; to be called inside the running event loop."""
        silence, published = self.config.engine.silence_seconds, partial(newest, self.pool)
        return self.provider or Fleet(self.engines, silence, published)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Route) -> web.StreamResponse:
        """Whatever is added later is the administrator's, unless it joins the routes that are open to agents."""
        if request.match_info.route.resource not in self._open:
            self.access.check_administrator(request)
        return await handler(request)

    @web.middleware
    async def _issued_keys_only(self, request: web.Request, handler: Route) -> web.StreamResponse:
        """A key of nobody opens no session here, wherever the proxy itself listens."""
        self.access.check_issued(request)
        return await handler(request)

    def runner(self, shutdown_seconds: float) -> GatewayRunner:
        """What serves the application on a socket."""
        return GatewayRunner(self.app(), self._limits, refusal, shutdown_seconds=shutdown_seconds)

    def sandbox_runner(self, shutdown_seconds: float) -> GatewayRunner:
        """What serves sandboxes on sockets of their own; to be set up after `runner`, and cleaned up before it."""
        return GatewayRunner(self.sandbox_app(), self._limits, refusal, shutdown_seconds=shutdown_seconds)

    async def _live(self, _app: web.Application) -> AsyncIterator[None]:
        threads, workers = ThreadPoolExecutor(SQL_THREADS, "pool"), ThreadPoolExecutor(THREAD_CAPACITY.total, "work")
        work = FairThreads(workers, THREAD_CAPACITY)
        proxy_id = register_proxy(self.pool, fingerprint(Path(self.config.engine.model)))
        ledger = DeliveryLedger(proxy_id)
        writer = self._writer = CompletionWriter(self.pool, proxy_id, ledger.committed)
        redelivery = Redelivery(self.pool, ledger, threads)
        confirming = asyncio.create_task(redelivery.keep_confirming())
        self._engine = self.fleet()
        sessions = Sessions(self.pool, self.template, self.access, threads=threads, work=work, clock=self.clock)
        self._sessions = sessions
        self._handler = self._make_handler(
            self.settings,
            self.template,
            Means(writer, redelivery, work),
            sessions=sessions,
            engine=self._engine,
            admission=self.admission,
            metrics=self.metrics,
        )
        yield
        confirming.cancel()
        await writer.close()
        await redelivery.confirm()
        await self._engine.close()
        threads.shutdown()
        workers.shutdown()
        self.pool.close()

    @web.middleware
    async def _errors(self, request: web.Request, handler: Route) -> web.StreamResponse:
        """Every error in the form of the path's dialect; a bug is logged with its traceback and answered with 500."""
        try:
            return await handler(request)
        except CallError as error:
            problem = error
        except PoolWriteError as error:  # a session could not be opened; what a call recorded is the handler's matter
            problem = CallError(507, "pool_write_failed", str(error))
        except PoolReadError as error:
            problem = CallError(503, "pool_unavailable", str(error))
        except web.HTTPException as error:
            problem = CallError(
                error.status, "not_found" if error.status == 404 else "http_error", _explain(request, error)
            )
        except ConnectionResetError:
            return web.Response(status=499)  # nobody is listening any more
        except Exception:  # the last line of defence: a bug must not look like a broken connection to the agent
            log.exception("bug while serving %s %s", request.method, request.path)
            problem = internal_error()
        self.metrics.failures[problem.code] += 1
        return refusal(request.path, problem)

    def _completing(self, dialect: Dialect) -> Route:
        async def complete(request: web.Request) -> web.StreamResponse:
            return await self._handler.complete(request, dialect)

        return complete

    def _counting(self, dialect: CountingDialect) -> Route:
        async def count(request: web.Request) -> web.StreamResponse:
            return await self._handler.count(request, dialect)

        return count

    async def _models(self, request: web.Request) -> web.Response:
        await self._sessions.admit(request)
        return web.json_response(chat_completions.models(self.model))

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _health(self, request: web.Request) -> web.Response:
        """That the proxy is up, for everybody; what it is made of, for the administrator."""
        if not self.access.is_administrator(request):
            return web.json_response({"status": "ok"})
        engine = {"url": ", ".join(self.engines), "ok": await self._engine.healthy()}
        status: dict[str, object] = {"status": "ok", "model": self.model, "engine": engine}
        status["replicas"] = [replica.status() for replica in self._engine.replicas]
        status["context_length"] = self.settings.context_length
        status["continued"] = dict(self.metrics.continued)
        local = self.access.open_to_all  # then clients may share the file, else nobody
        if local and self.pool.url.startswith("sqlite"):
            status["pool"] = self.pool.url
        status["sandboxes"] = self.for_sandboxes
        return web.json_response(status)


def _add_post(app: web.Application, path: str, route: Route) -> web.AbstractRoute:
    return app.router.add_post(ANY_PREFIX + path, route, expect_handler=_expect)


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Let a client go on that asks first; aiohttp's own refusal of anything else has no dialect's form."""
    if request.headers["Expect"].lower() != "100-continue":
        return refusal(request.path, CallError(417, "expectation_failed", "only Expect: 100-continue is served"))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


def _provider(config: ProxyConfig, url: str) -> Provider | None:
    """The provider that the address names, if it names one."""
    if not url.startswith(SCHEME):
        return None
    if config.engine.routed_experts:
        raise UserError(f"engine.routed_experts = true asks what {url} cannot say; set it to false")
    return Provider(url, config.sampling.max_new_tokens, config.engine.silence_seconds)


def _settings(config: ProxyConfig, template: ChatTemplate, turn: type[Turn], limits: RequestLimits) -> HandlerSettings:
    length = config.engine.context_length or template.context_length
    if length is None:
        raise UserError(f"the model {config.engine.model} names no max_position_embeddings; set engine.context_length")
    return HandlerSettings(
        config=config,
        limits=limits,
        context_length=length,
        turn=turn,
        mixture=read_mixture(Path(config.engine.model)) if config.engine.routed_experts else None,
    )


def refusal(path: str, problem: CallError) -> web.Response:
    """The error in the form of the path's dialect."""
    seconds = RETRY_SECONDS if problem.status == 429 else 1
    retry = {"Retry-After": str(seconds)} if problem.status in (429, 502, 503, 504) else {}
    response = web.json_response(_dialect(path).error(problem), status=problem.status, headers=retry)
    if problem.status in (408, 413):
        response.force_close()  # the rest of the body is still to come
    return response


def _dialect(path: str) -> Dialect:
    named = ((name.rpartition("}")[2], dialect) for name, dialect in [*DIALECTS.items(), *COUNTING.items()])
    return next((dialect for name, dialect in named if name in path), chat_completions)


def _explain(request: web.Request, error: web.HTTPException) -> str:
    served = ", ".join(f"POST .../{path.replace(':.+', '')}" for path in [*DIALECTS, *COUNTING])
    return f"{request.method} {request.path}: {error.reason}; served are {served} and GET .../models"
