"""Reads requests that repeat a header which may stand only once, as some clients do with User-Agent: the first counts.

aiohttp's parser refuses such a request, has no option for it, and cannot go on afterwards. So a new parser gets the
same bytes without the repetitions. Host, Content-Length and Transfer-Encoding must still be unique, since they say
where a request goes and where it ends.
"""

from collections.abc import Callable
from typing import Any

from aiohttp.http_exceptions import BadHttpMessage

MAY_REPEAT = frozenset(
    (b"user-agent", b"content-type", b"server", b"etag", b"content-location", b"content-range", b"max-forwards")
)
"""Headers of which aiohttp takes only one, and which the proxy does not read."""
REFUSED = "Duplicate '"
"""How aiohttp's message begins; its error has no type of its own."""


class TolerantParser:
    """A connection's parser, which starts again without repeated headers where these are all that is wrong."""

    def __init__(self, parser: Any, make: Callable[[], Any]):
        self._parser = parser
        self._make = make
        self._head = bytearray()
        """What has arrived of a request whose headers are not complete."""
        self._body: Any = None
        """The newest request's body."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> Any:
        """Parse more bytes. Requests that a client sends before it has its answers get no second try."""
        in_body = self._body is not None and not self._body.is_eof()
        try:
            parsed = self._parser.feed_data(data)
        except BadHttpMessage as error:
            if in_body or not error.message.startswith(REFUSED):
                raise
            once = _without_repetitions(bytes(self._head) + data)
            self._parser = self._make()
            parsed = self._parser.feed_data(once)
        if parsed[0]:
            self._body = parsed[0][-1][1]
            self._head.clear()
        elif not in_body:
            self._head += data
        return parsed


def _without_repetitions(request: bytes) -> bytes:
    """The request with the first of each header in MAY_REPEAT only."""
    head, end, rest = request.partition(b"\r\n\r\n")
    kept, seen = [], set()
    for line in head.split(b"\r\n"):
        name = line.partition(b":")[0].lower()
        if name not in seen:
            kept.append(line)
        if name in MAY_REPEAT:
            seen.add(name)
    return b"\r\n".join(kept) + end + rest
