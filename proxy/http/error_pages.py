"""The HTTP server under the application: what aiohttp refuses by itself is refused in an error form that agents read.

A request that is no HTTP never reaches the application: its path, and so its dialect, are unknown, and the answer has
the form of most clients, OpenAI's. Nothing of such a request is logged, as it may hold keys. Left out: a time limit for
headers; a connection that sends none costs a file descriptor.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from proxy.call import CallError
from proxy.http.limits import RequestLimits

log = logging.getLogger(__name__)
RefusalPage = Callable[[str, CallError], web.Response]
"""The answer that refuses a request to this path."""
TOO_MANY = "Too many headers"
"""How aiohttp words it; its error has no type of its own."""


class GatewayRunner(web.AppRunner):
    """Serves the gateway's application. A handler whose client has gone is cancelled."""

    def __init__(self, app: web.Application, limits: RequestLimits, refusal: RefusalPage, *, shutdown_seconds: float):
        super().__init__(app, access_log=None, handler_cancellation=True, shutdown_timeout=shutdown_seconds)
        self._limits = limits
        self._refusal = refusal

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _GatewayServer(made, self._limits, self._refusal)


class _GatewayServer(web.Server):
    def __init__(self, made: web.Server, limits: RequestLimits, refusal: RefusalPage):
        super().__init__(made.request_handler, request_factory=made.request_factory, handler_cancellation=True)
        self._limits = limits
        self._refusal = refusal

    def __call__(self) -> web.RequestHandler:
        return _GatewayConnection(self, self._limits, self._refusal)


class _GatewayConnection(web.RequestHandler):
    __slots__ = ("_limits", "_refusal")

    def __init__(self, server: web.Server, limits: RequestLimits, refusal: RefusalPage):
        size = limits.header_bytes
        options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
        }  # proxy/http/limits.py does it, bounded
        options |= {"max_line_size": size, "max_field_size": size, "max_headers": limits.headers}
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._limits = limits
        self._refusal = refusal

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if isinstance(exc, LineTooLong):
            rule = f"the request has a header over {self._limits.header_bytes} bytes; send shorter ones"
            problem = CallError(431, "headers_too_large", rule)
        elif TOO_MANY in str(exc):
            problem = CallError(431, "headers_too_many", f"the request has more than {self._limits.headers} headers")
        elif status < 500:
            problem = CallError(status, "invalid_request", "the request is no HTTP that can be read")
        else:
            log.error("bug outside of the application", exc_info=exc)
            problem = CallError(status, "internal_error", "the proxy failed; its log has the traceback")
        response = self._refusal("", problem)
        response.force_close()
        return response
