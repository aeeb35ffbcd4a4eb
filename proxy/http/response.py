"""The answer on its way to one client: as a stream of events with signs of life, or whole at the end.

An answer is closed when the kernel has all of it. Left out: what the events say (proxy/dialects), and when a client may
act on them (proxy/handler.py).
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
"""The header that names what was asked and changes nothing here."""


class ResponseWriter(Protocol):
    """What the handler needs of either way."""

    @property
    def begun(self) -> bool:
        """Whether the client has the headers."""

    @property
    def told(self) -> Collection[int]:
        """The answers, by their number, of which anything has left."""

    async def send(self, pieces: Sequence[Piece], choice: int) -> None:
        """What may leave of an answer while the rest is sampled."""

    async def close(self, replies: Sequence[Reply]) -> web.StreamResponse:
        """The end, which is all of it where nothing was sent. ConnectionResetError when the client left before it."""

    async def fail(self, problem: CallError) -> web.StreamResponse:
        """An error after the headers."""

    def rest(self) -> None:
        """No more signs of life."""


@dataclass(frozen=True)
class AnswerWriter:
    """One answer's part of a wire."""

    wire: ResponseWriter
    choice: int

    @property
    def told(self) -> bool:
        """Whether anything of the answer has left."""
        return self.choice in self.wire.told

    async def send(self, pieces: Sequence[Piece]) -> None:
        await self.wire.send(pieces, self.choice)


class WholeResponse:
    """Nothing before the end."""

    begun = False
    told: Collection[int] = ()

    def __init__(self, request: web.Request, call: Call, dialect: Dialect):
        self._request = request
        self._call = call
        self._dialect = dialect

    async def send(self, pieces: Sequence[Piece], choice: int) -> None:
        pass

    async def close(self, replies: Sequence[Reply]) -> web.StreamResponse:
        _until_flushed(self._request)
        body, headers = self._dialect.reply(self._call, *replies), _headers(self._call)
        response = web.Response(body=body, content_type="application/json", headers=headers)
        await response.prepare(self._request)
        await response.write_eof()
        return response

    async def fail(self, problem: CallError) -> web.StreamResponse:
        raise problem

    def rest(self) -> None:
        pass


class StreamedResponse:
    """The event stream to one client, opened by the first thing to send."""

    def __init__(self, request: web.Request, call: Call, events: EventStream, patience: float):
        self._request = request
        self._headers = _headers(call)
        self._events = events
        self._response: web.StreamResponse | None = None
        self.told: set[int] = set()
        self._opened = False
        self._resting = False
        self._writing = asyncio.Lock()
        self._written = time.monotonic()
        self._beat = asyncio.create_task(self._keep_alive(patience))

    async def send(self, pieces: Sequence[Piece], choice: int) -> None:
        if any(isinstance(piece, Text | Reasoning) for piece in pieces):
            self.told.add(choice)
            async with self._writing:
                await self._write(self._opening() + self._events.deltas(pieces, choice))

    async def close(self, replies: Sequence[Reply]) -> web.StreamResponse:
        _until_flushed(self._request)
        async with self._writing:
            self._resting = True  # a sign of life that waits for the lock comes too late
            response = await self._write(self._opening() + self._events.closing(*replies))
        await response.write_eof()
        return response

    async def fail(self, problem: CallError) -> web.StreamResponse:
        async with self._writing:
            self._resting = True
            return await self._write(self._events.failure(problem))

    @property
    def begun(self) -> bool:
        """Whether the client has the headers."""
        return self._response is not None

    def rest(self) -> None:
        """No more signs of life."""
        self._resting = True
        self._beat.cancel()

    async def _keep_alive(self, patience: float) -> None:
        with suppress(ConnectionResetError):  # the handler learns of it by itself
            while True:
                await asyncio.sleep(self._written + patience - time.monotonic())
                if time.monotonic() - self._written >= patience:
                    await asyncio.shield(self._sign_of_life())  # half a write would break the stream

    async def _sign_of_life(self) -> None:
        async with self._writing:
            if not self._resting:  # else the last event has left, or an answer of another kind
                await self._write(self._opening() + self._events.keepalive())

    def _opening(self) -> bytes:
        """The first events, once."""
        opened, self._opened = self._opened, True
        return b"" if opened else self._events.opening()

    async def _write(self, events: bytes) -> web.StreamResponse:
        """Under the lock, in which events are made as well: they number themselves in the order in which they leave."""
        self._written = time.monotonic()
        if self._response is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **self._headers}
            self._response = web.StreamResponse(headers=headers)
            await self._response.prepare(self._request)
        if events:
            await self._response.write(events)
        return self._response


def _headers(call: Call) -> dict[str, str]:
    return {IGNORED_HEADER: ", ".join(call.ignored)} if call.ignored else {}


def _until_flushed(request: web.Request) -> None:
    """From now on a write returns only when the kernel has all of it."""
    if request.transport is None:
        raise ConnectionResetError("the client went away")
    request.transport.set_write_buffer_limits(high=0)
