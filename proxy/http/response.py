"""Writes the answers to one client: as a stream of events, or all at once at the end. Both are kept alive meanwhile.

A client that waits for a whole answer gets its headers after `keepalive_seconds`, and white space before the JSON of
the body from then on. JSON allows that, and it ends no client's wait. The status is 200 by then, so a later error
breaks the connection before the body ends. A stream ends with an event for it, and in Gemini's form breaks off too.

An answer counts as delivered when the kernel has all of its bytes. Left out: what the events say (proxy/dialects), and
when a client may act on them (proxy/handler.py).
"""

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from aiohttp import HttpVersion11, web

from proxy.call import Call, CallError, Reply
from proxy.dialects.base import Dialect, EventStream
from proxy.parsing.turn_parser import Piece, Reasoning, Text

IGNORED_HEADER = "X-Blackforge-Ignored"
"""The header that names the request's fields that have no effect here."""
WHITE_SPACE = b" "
"""The sign of life before a JSON body."""
MOST_NAMES, NAME_CHARS = 40, 100
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)


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


class _KeptAlive(ABC):
    """A response that begins with its first bytes, and shows a sign of life whenever none have left for a while.

    `_writing` is a lock, because the handler and the keep-alive task write to the same connection: events must not
    mix, and they carry numbers in the order in which they leave, so they are also made under the lock.
    """

    def __init__(self, request: web.Request, headers: dict[str, str], keepalive_seconds: float):
        self._request = request
        self._headers = headers
        self._response: web.StreamResponse | None = None
        self._closing = False  # no sign of life may follow the end, or an error response in its place
        self._writing = asyncio.Lock()
        self._last_write = time.monotonic()
        self._seconds = keepalive_seconds
        self._keepalive: asyncio.Task[None] | None = None
        # Few calls last this long, and a timer costs less than a task.
        self._timer = asyncio.get_running_loop().call_later(keepalive_seconds, self._begin_keepalive)

    @property
    def headers_sent(self) -> bool:
        return self._response is not None

    def stop_keepalive(self) -> None:
        self._closing = True
        self._timer.cancel()
        if self._keepalive is not None:
            self._keepalive.cancel()

    @abstractmethod
    def _sign_of_life(self) -> bytes:
        """What leaves when nothing else has left for a while."""

    def _begin_keepalive(self) -> None:
        self._keepalive = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        with suppress(ConnectionError):  # the handler's next write raises it, too
            while True:
                if time.monotonic() - self._last_write >= self._seconds:
                    await asyncio.shield(self._write_sign())  # half an event would break the stream
                await asyncio.sleep(self._last_write + self._seconds - time.monotonic())

    async def _write_sign(self) -> None:
        async with self._writing:
            if not self._closing:
                await self._write(self._sign_of_life())

    async def _write(self, data: bytes) -> web.StreamResponse:
        """Write the headers, if they have not been sent, and the data. To be called under the lock."""
        self._last_write = time.monotonic()
        if self._response is None:
            self._response = web.StreamResponse(headers=self._headers)
            await self._response.prepare(self._request)
        if data:
            await self._response.write(data)
        return self._response


class WholeResponse(_KeptAlive):
    """A response that is sent when all answers are complete."""

    started: Collection[int] = ()

    def __init__(self, request: web.Request, call: Call, dialect: Dialect, keepalive_seconds: float):
        super().__init__(request, {"Content-Type": "application/json", **_headers(call)}, keepalive_seconds)
        self._call = call
        self._dialect = dialect
        if request.version < HttpVersion11:  # a body without a length ends with the connection: no error could show
            self.stop_keepalive()

    async def send(self, pieces: Sequence[Piece], number: int) -> None:
        pass

    async def close(self, replies: Sequence[Reply]) -> web.StreamResponse:
        _wait_until_flushed(self._request)
        body = self._dialect.reply(self._call, *replies)
        async with self._writing:
            self.stop_keepalive()
            if self._response is not None:
                await self._write(body)
                await self._response.write_eof()
                return self._response
            response = web.Response(body=body, headers=self._headers)
            await response.prepare(self._request)
        await response.write_eof()
        return response

    async def fail(self, error: CallError) -> web.StreamResponse:
        """Break the connection, which the client sees, since the body has no end; it may have white space only."""
        self.stop_keepalive()
        if self._request.transport is not None:
            self._request.transport.abort()
        raise _broken(error) from error

    def _sign_of_life(self) -> bytes:
        return WHITE_SPACE


class StreamedResponse(_KeptAlive):
    """A stream of events, begun by the first text, the first keep-alive or the end, whichever comes first."""

    def __init__(self, request: web.Request, call: Call, events: EventStream, keepalive_seconds: float):
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **_headers(call)}
        super().__init__(request, headers, keepalive_seconds)
        self._events = events
        self.started: set[int] = set()
        self._opened = False

    async def send(self, pieces: Sequence[Piece], number: int) -> None:
        if any(isinstance(piece, Text | Reasoning) for piece in pieces):
            async with self._writing:
                events = self._opening() + self._events.deltas(pieces, number)
                if events:  # of reasoning that the client is not shown, nothing leaves
                    self.started.add(number)
                    await self._write(events)

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
            response = await self._write(self._events.failure(error))
        if not self._events.breaks_off:
            return response
        if self._request.transport is not None:
            self._request.transport.close()  # sends first what is written, and never the body's end
        raise _broken(error) from error

    def _sign_of_life(self) -> bytes:
        return self._opening() + self._events.keepalive()

    def _opening(self) -> bytes:
        """The first events, once."""
        opened, self._opened = self._opened, True
        return b"" if opened else self._events.opening()


def _headers(call: Call) -> dict[str, str]:
    """The header with the names of ignored fields, bounded, since clients choose the names and refuse long headers."""
    names = [_UNSAFE.sub("?", name)[:NAME_CHARS] for name in dict.fromkeys(call.ignored)]
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return {IGNORED_HEADER: ", ".join(names[:MOST_NAMES] + more)} if names else {}


def _broken(error: CallError) -> ConnectionResetError:
    return ConnectionResetError(f"the connection was broken because the call failed: {error}")


def _wait_until_flushed(request: web.Request) -> None:
    """Let each later write return only when the kernel has all of its bytes."""
    if request.transport is None:
        raise ConnectionResetError("the client went away")
    request.transport.set_write_buffer_limits(high=0)
