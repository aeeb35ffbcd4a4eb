"""An answer counts as delivered when the kernel has all of it, and never when the client left earlier."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from aiohttp import web

from proxy.call import Call, CallError, Reply
from proxy.http.response import StreamedResponse, WholeResponse
from tests.proxy.conftest import listening

LARGE = b"x" * 50_000_000
"""More bytes than the kernel buffers for a client that does not read."""
REPLY = Reply(
    content="", reasoning="", tool_calls=(), finish_reason="stop", stop_sequence=None,
    prompt_tokens=0, sampled_tokens=0, cached_tokens=0,
)  # fmt: skip


class Large:
    """A dialect and its events, with large answers."""

    NAME, PROMPT, CHOICES = "large", "prompt", ""
    events: Any = None
    breaks_off = False

    def read(self, body: bytes, path: str) -> Call:
        return Call(model="")

    def reply(self, call: Call, answer: Reply, *others: Reply) -> bytes:
        return LARGE

    def error(self, problem: CallError) -> dict[str, Any]:
        return {}

    def opening(self) -> bytes:
        return b""

    def deltas(self, pieces: Any, choice: int = 0) -> bytes:
        return b""

    def closing(self, answer: Reply, *others: Reply) -> bytes:
        return LARGE

    def failure(self, problem: CallError) -> bytes:
        return b""

    def keepalive(self) -> bytes:
        return b""


class Server:
    """Answers each request with LARGE and notes whether the answer was delivered."""

    def __init__(self) -> None:
        self.url = ""
        self.closing = asyncio.Event()
        self.ended = asyncio.Event()
        self.arrived = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        call, large = Call(model=""), Large()
        writer = (
            StreamedResponse(request, call, large, 60)
            if request.path == "/stream"
            else WholeResponse(request, call, large, 60)
        )
        try:
            self.closing.set()
            response = await writer.close([REPLY])
            self.arrived = True
            return response
        finally:
            writer.stop_keepalive()
            self.ended.set()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server, app = Server(), web.Application()
    app.router.add_post("/{kind}", server.answer)
    async with AsyncExitStack() as stack:
        server.url = await listening(app, stack)
        yield server


async def ask(server: Server, kind: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    writer.write(f"POST /{kind} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode())
    await server.closing.wait()
    await reader.readexactly(1)
    return reader, writer


@pytest.mark.parametrize("kind", ["stream", "whole"])
async def test_an_answer_arrives_when_it_is_read(server: Server, kind: str) -> None:
    reader, writer = await ask(server, kind)
    assert not server.ended.is_set()
    while not server.ended.is_set():
        await reader.read(1 << 20)
    assert server.arrived
    writer.close()


@pytest.mark.parametrize("kind", ["stream", "whole"])
async def test_an_answer_that_the_client_does_not_wait_for_has_not_arrived(server: Server, kind: str) -> None:
    _, writer = await ask(server, kind)
    writer.transport.abort()
    await server.ended.wait()
    assert not server.arrived
