"""Error responses, and the HTTP server under the application, which sends them where aiohttp itself refuses a request.

A request that is not valid HTTP never reaches the application, so its path and dialect are unknown, and it gets the
format that most clients read, OpenAI's. Nothing of such a request is logged, since it may hold keys. How long a
connection may do nothing: proxy/http/connections.py.

aiohttp 3 has no public way to set the parser's limits or to shape these answers, so three of its classes are extended.
Its parser is wrapped, too (proxy/http/repeated_headers.py).
"""

import asyncio
import logging
from functools import partial
from typing import Any, cast

from aiohttp import web
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import LineTooLong

from proxy.call import CallError, internal_error
from proxy.http.admission import RETRY_SECONDS
from proxy.http.connections import TOO_MANY_CONNECTIONS, ClientConnections
from proxy.http.limits import RequestLimits
from proxy.http.repeated_headers import TolerantParser
from proxy.http.routes import dialect_of

log = logging.getLogger(__name__)
TOO_MANY = "Too many headers"
"""aiohttp's message for it; its error has no type of its own."""


def error_response(path: str, error: CallError) -> web.Response:
    """Make the error response in the format of the path's dialect."""
    seconds = RETRY_SECONDS if error.status == 429 else 1
    retry = {"Retry-After": str(seconds)} if error.status in (429, 502, 503, 504) else {}
    response = web.json_response(dialect_of(path).error(error), status=error.status, headers=retry)
    if error.status in (408, 413) or error.code in ("too_many_bytes", TOO_MANY_CONNECTIONS):
        response.force_close()  # the connection may still carry the rest of the body
    return response


class GatewayRunner(web.AppRunner):
    """Serves the gateway's application, and cancels the handler of a request whose client has gone."""

    def __init__(
        self, app: web.Application, limits: RequestLimits, clients: ClientConnections, *, shutdown_seconds: float
    ):
        super().__init__(app, access_log=None, handler_cancellation=True, shutdown_timeout=shutdown_seconds)
        self._limits = limits
        self._clients = clients

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _GatewayServer(server, self._limits, self._clients)


class _GatewayServer(web.Server):
    def __init__(self, server: web.Server, limits: RequestLimits, clients: ClientConnections):
        super().__init__(server.request_handler, request_factory=server.request_factory, handler_cancellation=True)
        self._limits = limits
        self._clients = clients

    def __call__(self) -> web.RequestHandler:
        return _GatewayConnection(self, self._limits, self._clients)


class _GatewayConnection(web.RequestHandler):
    __slots__ = ("_clients", "_limits", "_wire")

    def __init__(self, server: web.Server, limits: RequestLimits, clients: ClientConnections):
        size = limits.header_bytes
        # Bodies are decompressed in proxy/http/bodies.py, which stops at the limit.
        parsing: dict[str, Any] = {"max_line_size": size, "max_field_size": size, "max_headers": limits.headers}
        parsing |= {"auto_decompress": False}
        options: dict[str, Any] = {"access_log": None, "keepalive_timeout": limits.idle_seconds}
        super().__init__(server, loop=asyncio.get_running_loop(), **options, **parsing)
        parsing |= {"payload_exception": web.RequestPayloadError, "max_msg_queue_size": self._max_msg_queue_size}
        again = partial(HttpRequestParser, self, self._loop, self._read_bufsize, **parsing)
        self._parser = cast(Any, TolerantParser(self._parser, again))
        self._limits = limits
        self._clients = clients

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._wire = cast(asyncio.Transport, transport)  # aiohttp forgets its own before the last bytes have left
        self._clients.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._clients.closed(self)
        super().connection_lost(exc)

    @property
    def busy(self) -> bool:
        return self._current_request is not None

    @property
    def requests(self) -> int:
        return self._request_count

    @property
    def unsent_bytes(self) -> int:
        return self._wire.get_write_buffer_size()

    def cut_off(self) -> None:
        self._wire.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if isinstance(exc, LineTooLong):
            rule = f"the request has a header of over {self._limits.header_bytes} bytes; send shorter ones"
            problem = CallError(431, "headers_too_large", rule)
        elif TOO_MANY in str(exc):
            rule = f"the request has more than {self._limits.headers} headers; send fewer"
            problem = CallError(431, "headers_too_many", rule)
        elif status < 500:
            problem = CallError(status, "invalid_request", "the request is not valid HTTP; send HTTP/1.1")
        else:
            log.error("bug outside of the application", exc_info=exc)
            problem = internal_error(status)
        response = error_response("", problem)
        response.force_close()
        return response
