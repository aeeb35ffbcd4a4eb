"""The dashboard as an aiohttp application: routes, errors, and the threads in which the pool is read."""

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from proxy.dashboard.access import HEADERS, TokenAccess
from proxy.dashboard.answers import answer
from proxy.dashboard.indexer import Indexer
from proxy.dashboard.live import LiveRoute
from proxy.dashboard.machine_routes import MachineRoutes
from proxy.dashboard.reader import RouteTable
from proxy.dashboard.rollout_routes import RolloutRoutes
from proxy.dashboard.run_routes import RunRoutes
from proxy.dashboard.search_routes import SearchRoutes
from proxy.pool.database import Pool
from proxy.pool.errors import NotInPool, PoolError, UserError
from proxy.pool.search.index import place_of

log = logging.getLogger(__name__)
STATIC = Path(__file__).parent / "static"
THREADS = 4
"""Threads that read the pool. More would only wait for one another."""
MOST_WAITING = 64
"""Requests that wait for a thread. Browsers ask again."""
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}

T = TypeVar("T")
Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True)
class DashboardOptions:
    """What a dashboard needs to know besides its pool."""

    model: Path | None = None
    """A directory with the tokenizer of the pool's tokens; None: it is looked for."""
    proxies: Sequence[str] = ()
    """Addresses of proxies that are asked for their replicas."""
    admin_key: str | None = None
    """The key of their administrator."""
    index: Path | None = None
    """The file of the search index; None: beside the pool, or in the user's cache."""


DEFAULTS = DashboardOptions()


class Dashboard:
    """The pages of one pool."""

    def __init__(self, pool: Pool, options: DashboardOptions = DEFAULTS):
        self.access = TokenAccess()
        self._pool = pool
        self._threads = ThreadPoolExecutor(THREADS, "dashboard-pool")
        self._waiting = 0
        self._live = LiveRoute(pool, self.read)
        self._indexer = Indexer(pool, options.index or place_of(pool.url))
        self._routes: list[RouteTable] = [
            RunRoutes(pool, self.read),
            RolloutRoutes(pool, self.read, options.model),
            SearchRoutes(pool, self.read, self._indexer),
            MachineRoutes(pool, self.read, options.proxies, options.admin_key),
            self._live,
        ]

    def app(self) -> web.Application:
        """Make the application."""
        app = web.Application(middlewares=[self._guarded], client_max_size=1024)
        for routes in self._routes:
            routes.add(app.router)
        files = {path.relative_to(STATIC).as_posix(): path for path in STATIC.rglob("*") if path.suffix in TYPES}
        for name, path in files.items():
            app.router.add_get(f"/{name}", _file(path))
        app.router.add_get("/", _file(files["index.html"]))
        app.on_startup.append(self._start)
        app.on_shutdown.append(self._live.stop)
        app.on_cleanup.append(self._close)
        return app

    async def read(self, work: Callable[..., T], *given: Any) -> T:
        """Read the pool in a thread. PoolError when too many requests wait for one."""
        if self._waiting >= MOST_WAITING:
            raise PoolError("too many requests wait for the pool; ask again")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *given)
        finally:
            self._waiting -= 1

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Route) -> web.StreamResponse:
        """Let nobody in without the token, and turn errors into a sentence."""
        refused = self.access.refusal(request)
        response = await _answered(request, handler) if refused is None else refused
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    async def _start(self, _: web.Application) -> None:
        self._indexer.start()

    async def _close(self, _: web.Application) -> None:
        await asyncio.to_thread(self._indexer.stop)
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _answered(request: web.Request, handler: Route) -> web.StreamResponse:
    try:
        return await handler(request)
    except NotInPool as error:
        return answer({"error": str(error)}, 404)
    except UserError as error:
        return answer({"error": str(error)}, 400)
    except PoolError as error:
        return answer({"error": str(error)}, 503)
    except web.HTTPException as error:
        return answer({"error": f"{request.method} {request.path}: {error.reason}"}, error.status)
    except (zlib.error, msgspec.DecodeError) as error:
        return answer({"error": f"a row of this is damaged ({error}); `proxy pool verify` names it"}, 500)
    except Exception:  # a bug: its trace belongs in the log, and the page gets a sentence
        log.exception("a page of the dashboard failed: %s", request.path)
        return answer({"error": "the dashboard failed at this; its log has the reason"}, 500)


def _file(path: Path) -> Route:
    content, kind = path.read_bytes(), TYPES[path.suffix]

    async def serve(_: web.Request) -> web.Response:
        # asked for again at every visit, so that a newer blackforge shows its own pages
        return web.Response(body=content, content_type=kind, charset="utf-8", headers={"Cache-Control": "no-cache"})

    return serve
