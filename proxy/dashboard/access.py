"""Who may see the dashboard: whoever has the token of its address. Everybody else gets nothing, not even its pages.

The first visit brings the token in the address and gets a cookie for it, so that the token stands neither in the
browser's history nor in links. A request that names another host, as one of a rebound DNS name does, is refused.
"""

import secrets
from urllib.parse import urlencode

from aiohttp import web

PARAMETER = "token"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer. Trusted types refuse what would read a text as HTML, so that none can become a script."""
REFUSED = "open the address that `proxy dashboard` printed, with its token\n"
LOCAL = ("127.0.0.1", "localhost", "[::1]")


class TokenAccess:
    """The token of one dashboard."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(24)

    def refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that may see nothing, or the way on for a first visit; None: it may pass."""
        if host_of(request) not in LOCAL or request.headers.get("Sec-Fetch-Site") == "cross-site" and _is_api(request):
            return web.Response(status=403, text=REFUSED)
        if self._is(request.query.get(PARAMETER)):
            return None if _is_api(request) else self._welcome(request)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if self._is(request.cookies.get(_cookie(request))) or scheme.lower() == "bearer" and self._is(given.strip()):
            return None
        return web.Response(status=401, text=REFUSED)

    def _is(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(errors="replace"), self.token.encode())

    def _welcome(self, request: web.Request) -> web.Response:
        """Send a browser to the same page without the token, which it keeps as a cookie."""
        rest = [(name, value) for name, value in request.query.items() if name != PARAMETER]
        path = f"/{request.path.lstrip('/')}"  # never //host, which would lead elsewhere
        answer = web.Response(status=303, headers={"Location": f"{path}?{urlencode(rest)}" if rest else path})
        # Lax: a link in a chat or an editor opens the page; what other sites load from here comes without it
        answer.set_cookie(_cookie(request), self.token, httponly=True, samesite="Lax", path="/")
        return answer


def host_of(request: web.Request) -> str:
    """Return the host that a request names, without the port."""
    name, _, port = request.host.rpartition(":")
    return name if port.isdecimal() else request.host


def _cookie(request: web.Request) -> str:
    """Cookies know no ports, and several dashboards may run on a machine."""
    port = request.host.rpartition(":")[2]
    return f"blackforge-{port}" if port.isdecimal() else "blackforge"


def _is_api(request: web.Request) -> bool:
    return request.path.startswith("/api/")
