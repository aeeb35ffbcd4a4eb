"""HTTP/1.1 with one engine, as far as `/generate` needs it: one POST after the other, its answer's bytes as they come.

Every call of an agent makes this one request, and aiohttp's client costs more than all that the gateway does with what
it brings. Left out: other methods, redirects, cookies, compressed answers, forward proxies; and back pressure, as what
an engine sends is small and taken at once.
"""

import asyncio
import ssl
from typing import Protocol, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

CONNECT_SECONDS = 10
IDLE_SECONDS = 4
"""How long an unused connection is trusted to be open: uvicorn, under SGLang, closes one after five."""


class Receiver(Protocol):
    """Who takes an answer."""

    def begun(self, status: int, content_type: str) -> None:
        """The headers are there."""

    def received(self, data: bytes) -> None:
        """Some of the body."""

    def ended(self, error: Exception | None) -> None:
        """The last of all: the answer is whole (None), broke off, or nothing has come for too long (TimeoutError)."""


class Connections:
    """Keep-alive connections to one server, as many as there are requests at a time. Use it in one event loop."""

    def __init__(self, url: str, silence_seconds: float):
        address = urlsplit(url)
        self._context = ssl.create_default_context() if address.scheme == "https" else None
        self._host, self._port = address.hostname or "", address.port or (443 if self._context else 80)
        self._head = f"{address.path} HTTP/1.1\r\nHost: {address.netloc.rpartition('@')[2]}\r\n"
        self._silence = silence_seconds
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    async def post(self, path: str, body: bytes, receiver: Receiver) -> "Connection":
        """Send JSON; the receiver has the answer. OSError when no connection can be made, TimeoutError among them."""
        connection = self._unused() or await self._connect()
        base, _, rest = self._head.partition(" ")
        head = f"POST {base}{path} {rest}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.send(head.encode() + body, receiver)
        return connection

    def close(self) -> None:
        for connection in list(self._open):
            connection.close()

    def rests(self, connection: "Connection") -> None:
        """It may be used again."""
        self._idle.append(connection)

    def gone(self, connection: "Connection") -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _unused(self) -> "Connection | None":
        """The one that was used last; those that have been idle for too long are closed."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            connection.close()
        return None

    async def _connect(self) -> "Connection":
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            make = loop.create_connection(
                lambda: Connection(self, self._silence), self._host, self._port, ssl=self._context
            )
            connection = (await make)[1]
        self._open.add(connection)
        return connection


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, owner: Connections, silence_seconds: float):
        self._owner = owner
        self._silence = silence_seconds
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._body: list[bytes] = []
        self._content_type = ""
        self._begun = self._sized = self._whole = self._more = self._goes_on = False

    def send(self, request: bytes, receiver: Receiver) -> None:
        self._receiver, self._heard = receiver, self._loop.time()
        self._content_type, self._begun, self._sized, self._whole, self._more = "", False, False, False, False
        self._timer = self._loop.call_later(self._silence, self._check)
        self._transport.write(request)

    def is_fresh(self) -> bool:
        return self._loop.time() - self._heard < IDLE_SECONDS and not self._transport.is_closing()

    def close(self) -> None:
        """Nothing more is wanted of it."""
        self._transport.abort()

    # ---- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:  # nobody asked, and what answers whom would be a guess from here on
            self.close()
            return
        self._heard = self._loop.time()
        problem = None
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            problem = error
        if self._body:
            body, self._body = b"".join(self._body), []
            self._receiver.received(body)
        if self._whole and problem is None and self._goes_on and not self._more:
            self._end(None)
            self._owner.rests(self)
        elif self._whole or problem is not None:
            self._end(None if self._whole else problem)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.gone(self)
        unsized = self._begun and not self._sized  # then its end is the connection's
        self._end(None if unsized and error is None else error or ConnectionResetError("the connection was closed"))

    # ---- what the parser calls

    def on_message_begin(self) -> None:
        self._more = self._whole  # another answer, which nobody asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        field = name.lower()
        if field == b"content-type":
            self._content_type = value.partition(b";")[0].strip().lower().decode("latin-1")
        self._sized = self._sized or field in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._receiver is not None and not self._more:
            self._begun = True
            self._receiver.begun(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        if not self._more:
            self._body.append(body)

    def on_message_complete(self) -> None:
        self._whole = True
        self._goes_on = self._parser.should_keep_alive()  # later the parser does not know any more

    # ----

    def _check(self) -> None:
        """Called when something should have come; what has come since puts it off."""
        left = self._heard + self._silence - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._end(TimeoutError())
            self.close()

    def _end(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.ended(error)
