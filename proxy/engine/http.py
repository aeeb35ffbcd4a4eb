"""A minimal HTTP/1.1 client for `/generate`: keep-alive POST requests whose answers arrive as they are sent.

Every model call makes one such request, and aiohttp's client costs more than everything else that the proxy does with
the answer (docs/performance.md). Left out: other methods, redirects, cookies, compressed answers, forward proxies; and
back pressure, because what an engine sends is small and taken at once.
"""

import asyncio
import ssl
from typing import Protocol, cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

CONNECT_SECONDS = 10
IDLE_SECONDS = 4
"""How long an unused connection is reused: uvicorn, which serves SGLang 0.5.23, closes one after five seconds."""


class Receiver(Protocol):
    """Takes the parts of an answer."""

    def begun(self, status: int, content_type: str) -> None:
        """The headers have come."""

    def received(self, data: bytes) -> None:
        """A part of the body has come."""

    def ended(self, error: Exception | None) -> None:
        """Called last: the answer is complete (None), broke off, or stayed silent for too long (TimeoutError)."""


class Connections:
    """Keep-alive connections to one server, as many as there are simultaneous requests. Use it in one event loop."""

    def __init__(self, url: str, silence_seconds: float):
        address = urlsplit(url)
        self._context = ssl.create_default_context() if address.scheme == "https" else None
        self._host, self._port = address.hostname or "", address.port or (443 if self._context else 80)
        self._head = f"{address.path} HTTP/1.1\r\nHost: {address.netloc.rpartition('@')[2]}\r\n"
        self._silence_seconds = silence_seconds
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    async def post(self, path: str, body: bytes, receiver: Receiver) -> "Connection":
        """Send JSON; the receiver gets the answer. Raises OSError (also TimeoutError) when it cannot connect."""
        connection = self._unused() or await self._connect()
        base, _, rest = self._head.partition(" ")
        head = f"POST {base}{path} {rest}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.send(head.encode() + body, receiver)
        return connection

    def close(self) -> None:
        for connection in list(self._open):
            connection.close()

    def keep(self, connection: "Connection") -> None:
        """Keep a connection whose answer is complete for the next request."""
        self._idle.append(connection)

    def forget(self, connection: "Connection") -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _unused(self) -> "Connection | None":
        """The idle connection that was used last; those that were idle for too long are closed."""
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
                lambda: Connection(self, self._silence_seconds), self._host, self._port, ssl=self._context
            )
            connection = (await make)[1]
        self._open.add(connection)
        return connection


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, owner: Connections, silence_seconds: float):
        self._owner = owner
        self._silence_seconds = silence_seconds
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_data = 0.0
        self._body: list[bytes] = []
        self._content_type = ""
        self._begun = self._sized = self._whole = self._extra = self._keep_alive = False

    def send(self, request: bytes, receiver: Receiver) -> None:
        self._receiver, self._last_data = receiver, self._loop.time()
        self._content_type, self._begun, self._sized, self._whole, self._extra = "", False, False, False, False
        self._timer = self._loop.call_later(self._silence_seconds, self._check)
        self._transport.write(request)

    def is_fresh(self) -> bool:
        return self._loop.time() - self._last_data < IDLE_SECONDS and not self._transport.is_closing()

    def close(self) -> None:
        """Drop the connection without waiting."""
        self._transport.abort()

    # ---- what the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass, but has the methods

    def data_received(self, data: bytes) -> None:
        if self._receiver is None:  # bytes that no request asked for: later answers could be mistaken
            self.close()
            return
        self._last_data = self._loop.time()
        problem = None
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            problem = error
        if self._body:
            body, self._body = b"".join(self._body), []
            self._receiver.received(body)
        if self._whole and problem is None and self._keep_alive and not self._extra:
            self._end(None)
            self._owner.keep(self)
        elif self._whole or problem is not None:
            self._end(None if self._whole else problem)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._owner.forget(self)
        unsized = self._begun and not self._sized  # then the end of the connection ends the body
        self._end(None if unsized and error is None else error or ConnectionResetError("the connection was closed"))

    # ---- what the parser calls

    def on_message_begin(self) -> None:
        self._extra = self._whole  # an answer that no request asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        field = name.lower()
        if field == b"content-type":
            self._content_type = value.partition(b";")[0].strip().lower().decode("latin-1")
        self._sized = self._sized or field in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        if self._receiver is not None and not self._extra:
            self._begun = True
            self._receiver.begun(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        if not self._extra:
            self._body.append(body)

    def on_message_complete(self) -> None:
        self._whole = True
        self._keep_alive = self._parser.should_keep_alive()  # httptools forgets it after this callback

    # ----

    def _check(self) -> None:
        """End the answer if the server was silent for too long; else check again when it could be."""
        left = self._last_data + self._silence_seconds - self._loop.time()
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
