"""Writes the answers to one client: as a stream of events with keep-alives, or all at once at the end.

An answer counts as delivered when the kernel has all of its bytes. Left out: what the events say (proxy/dialects), and
when a client may act on them (proxy/handler.py).
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from proxy.call import Call, CallError, Reply
from proxy.dialects.base import Dialect, EventStream
from proxy.parsing.turn_parser import Piece, Reasoning, Text

IGNORED_HEADER = "X-Blackforge-Ignored"
"""The header that names the request's fields that have no effect here."""


class ResponseWriter(Protocol):
    """The response to one request, streamed or not."""

    @property
    def headers_sent(self) -> bool:
        """Whether the client has the headers, so that the status can no longer change."""

    @property
    def started(self) -> Collection[int]:
        """The numbers of the answers of which the client has some text."""

    async def send(self, pieces: Sequence[Piece], number: int) -> None:
        """Send the text of answer `number` that may leave while the rest is sampled."""

    async def close(self, replies: Sequence[Reply]) -> web.StreamResponse:
        """Send the rest of all answers; ConnectionResetError when the client left before it had everything."""

    async def fail(self, error: CallError) -> web.StreamResponse:
        """Send an error after the headers."""

    def stop_keepalive(self) -> None:
        """Send no more keep-alives."""


@dataclass(frozen=True)
class AnswerWriter:
    """The part of a response that belongs to one of its answers."""

    response: ResponseWriter
    number: int

    @property
    def started(self) -> bool:
        """Whether the client has some text of the answer."""
        return self.number in self.response.started

    async def send(self, pieces: Sequence[Piece]) -> None:
        """Send the text that may leave while the rest is sampled."""
        await self.response.send(pieces, self.number)


class WholeResponse:
    """A response that is sent when all answers are complete."""

    headers_sent = False
    started: Collection[int] = ()

    def __init__(self, request: web.Request, call: Call, dialect: Dialect):
        self._request = request
        self._call = call
        self._dialect = dialect

    async def send(self, pieces: Sequence[Piece], number: int) -> None:
        pass

    async def close(self, replies: Sequence[Reply]) -> web.StreamResponse:
        _wait_until_flushed(self._request)
        body, headers = self._dialect.reply(self._call, *replies), _headers(self._call)
        response = web.Response(body=body, content_type="application/json", headers=headers)
        await response.prepare(self._request)
        await response.write_eof()
        return response

    async def fail(self, error: CallError) -> web.StreamResponse:
        raise error

    def stop_keepalive(self) -> None:
        pass


class StreamedResponse:
    """A stream of events, begun by the first text, the first keep-alive or the end, whichever comes first.

    `_writing` is a lock, because the handler and the keep-alive task write to the same connection: events must not
    mix, and they carry numbers in the order in which they leave, so they are also made under the lock.
    """

    def __init__(self, request: web.Request, call: Call, events: EventStream, keepalive_seconds: float):
        self._request = request
        self._headers = _headers(call)
        self._events = events
        self._response: web.StreamResponse | None = None
        self.started: set[int] = set()
        self._opened = False
        self._closing = False  # no keep-alive may follow the last event, or an error response in its place
        self._writing = asyncio.Lock()
        self._last_write = time.monotonic()
        self._keepalive = asyncio.create_task(self._keep_alive(keepalive_seconds))

    @property
    def headers_sent(self) -> bool:
        return self._response is not None

    async def send(self, pieces: Sequence[Piece], number: int) -> None:
        if any(isinstance(piece, Text | Reasoning) for piece in pieces):
            self.started.add(number)
            async with self._writing:
                await self._write(self._opening() + self._events.deltas(pieces, number))

    async def close(self, replies: Sequence[Reply]) -> web.StreamResponse:
        _wait_until_flushed(self._request)
        async with self._writing:
            self._closing = True  # a keep-alive that waits for the lock would come after the last event
            response = await self._write(self._opening() + self._events.closing(*replies))
        await response.write_eof()
        return response

    async def fail(self, error: CallError) -> web.StreamResponse:
        async with self._writing:
            self._closing = True
            return await self._write(self._events.failure(error))

    def stop_keepalive(self) -> None:
        self._closing = True
        self._keepalive.cancel()

    async def _keep_alive(self, seconds: float) -> None:
        with suppress(ConnectionResetError):  # the handler's next write raises it, too
            while True:
                await asyncio.sleep(self._last_write + seconds - time.monotonic())
                if time.monotonic() - self._last_write >= seconds:
                    await asyncio.shield(self._write_keepalive())  # half an event would break the stream

    async def _write_keepalive(self) -> None:
        async with self._writing:
            if not self._closing:
                await self._write(self._opening() + self._events.keepalive())

    def _opening(self) -> bytes:
        """The first events, once."""
        opened, self._opened = self._opened, True
        return b"" if opened else self._events.opening()

    async def _write(self, events: bytes) -> web.StreamResponse:
        """Write the headers, if they have not been sent, and the events. To be called under the lock."""
        self._last_write = time.monotonic()
        if self._response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **self._headers}
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        if events:
            await self._response.write(events)
        return self._response


def _headers(call: Call) -> dict[str, str]:
    return {IGNORED_HEADER: ", ".join(call.ignored)} if call.ignored else {}


def _wait_until_flushed(request: web.Request) -> None:
    """From now on, let each write return only when the kernel has all of its bytes."""
    if request.transport is None:
        raise ConnectionResetError("the client went away")
    request.transport.set_write_buffer_limits(high=0)
