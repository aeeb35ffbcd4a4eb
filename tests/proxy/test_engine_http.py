"""HTTP with engines: all ways in which an answer is framed or breaks off, and connections that are used again.

The engine is a socket that sends given bytes. Left out: what an answer holds (test_faults).
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from proxy.engine.client import EngineClient, _Answer
from proxy.engine.engine_call import EngineError, GenerateEvent, Sampling, SamplingRequest
from proxy.engine.http import Connections

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BODY = b'{"ok": 1}'
SIZED = JSON + b"Content-Length: 9\r\n\r\n" + BODY
CHUNKED = JSON + b"Transfer-Encoding: chunked\r\n\r\n4\r\n" + BODY[:4] + b"\r\n5\r\n" + BODY[4:] + b"\r\n0\r\n\r\n"
UNSIZED = JSON + b"\r\n" + BODY
REQUEST = SamplingRequest(prompt=b"[1]", prompt_length=1, max_new_tokens=1, stream=True)


@dataclass
class Got:
    """What a receiver got."""

    status: int = 0
    content_type: str = ""
    body: bytes = b""
    error: Exception | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def begun(self, status: int, content_type: str) -> None:
        self.status, self.content_type = status, content_type

    def received(self, data: bytes) -> None:
        self.body += data

    def ended(self, error: Exception | None) -> None:
        assert not self.over.is_set()
        self.error = error
        self.over.set()


@dataclass
class Server:
    """Answers every request with `answer`, in pieces of one byte where `slowly`; then closes when `closes`."""

    answer: bytes = SIZED
    slowly: bool = False
    closes: bool = False
    closes_at: int = 0
    """The request that is not answered: the connection ends instead."""
    later: bytes = b""
    """What follows each answer after a while."""
    connections: int = 0
    ended: int = 0
    """Connections that the client has closed."""
    requests: list[bytes] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            self.requests.append(head + await reader.readexactly(length))
            if len(self.requests) == self.closes_at:
                writer.close()
                return
            for piece in [self.answer[i : i + 1] for i in range(len(self.answer))] if self.slowly else [self.answer]:
                writer.write(piece)
                await asyncio.sleep(0)
            if self.later:
                await asyncio.sleep(0.05)
                writer.write(self.later)
            if self.closes:
                writer.close()
                return


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Connections]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await server.serve(reader, writer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            server.ended += 1
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/base"
    connections = Connections(server.url, 30)
    yield connections
    connections.close()
    listener.close()


async def post(connections: Connections, body: bytes = b"{}") -> Got:
    got = Got()
    await connections.post("/generate", body, got)
    await got.over.wait()
    return got


@pytest.mark.parametrize("slowly", [False, True])
@pytest.mark.parametrize("answer", [SIZED, CHUNKED, UNSIZED], ids=["sized", "chunked", "unsized"])
async def test_an_answer_is_read_however_it_is_framed(answer: bytes, slowly: bool) -> None:
    async with serving(server := Server(answer, slowly, closes=answer == UNSIZED)) as connections:
        for sent in (b"{}", b'{"input_ids": [1]}'):
            got = await post(connections, sent)
            assert (got.status, got.content_type, got.body, got.error) == (200, "application/json", BODY, None)
            assert server.requests[-1].startswith(b"POST /base/generate HTTP/1.1\r\nHost: 127.0.0.1:")
            assert server.requests[-1].endswith(b"\r\n\r\n" + sent)
        assert server.connections == (2 if server.closes else 1)


async def test_requests_at_one_time_have_a_connection_each() -> None:
    async with serving(server := Server()) as connections:
        for _ in range(2):
            assert [got.error for got in await asyncio.gather(*(post(connections) for _ in range(3)))] == [None] * 3
        assert (server.connections, len(server.requests)) == (3, 6)


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async with serving(server := Server(closes=True)) as connections:
        for _ in range(3):
            assert (await post(connections)).error is None
            while connections._open:  # the end of the connection is on its way
                await asyncio.sleep(0.01)
        assert server.connections == 3


@pytest.mark.parametrize("more", [SIZED, JSON, b"HTTP/1.1 408"], ids=["answer", "head", "begun"])
@pytest.mark.parametrize("apart", [False, True])
async def test_a_connection_with_an_answer_that_nobody_asked_for_is_not_used_again(more: bytes, apart: bool) -> None:
    server = Server(later=more) if apart else Server(SIZED + more)
    async with serving(server) as connections, asyncio.timeout(30):
        assert (await post(connections)).body == BODY
        while server.ended < 1:
            await asyncio.sleep(0.01)
        assert [got.body for got in await asyncio.gather(post(connections), post(connections))] == [BODY, BODY]


async def test_a_connection_that_ends_before_its_second_answer_was_closed() -> None:
    async with serving(Server(closes_at=2)) as connections:
        assert (await post(connections)).error is None
        assert isinstance((await post(connections)).error, ConnectionResetError)


@pytest.mark.parametrize("answer", [b"", SIZED[:-1], CHUNKED[:-2], b"HTTP/1.1 what\r\n\r\n", b"220 smtp\r\n"])
async def test_an_answer_that_is_not_whole_is_an_error(answer: bytes) -> None:
    async with serving(Server(answer, closes=True)) as connections:
        assert (await post(connections)).error is not None


@pytest.mark.parametrize("given", [[], [7, 8]])
def test_an_engine_call_is_silent_until_it_has_brought_tokens_itself(given: list[int]) -> None:
    """Behind given tokens, and behind those of an engine that was lost."""
    sampling = Sampling()
    for _ in range(2):
        answer = _Answer(sampling)
        assert answer.silent
        sampling.extend(GenerateEvent(output_ids=[5, 6]))
        assert not answer.silent
        sampling.go_on(given)


async def test_what_the_engine_said_before_it_was_silent_is_kept() -> None:
    event = b'data: {"output_ids": [7], "meta_info": {"completion_tokens": 1}}\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serving(server := Server(head + b"%x\r\n%b\r\n" % (len(event), event))):
        client, sampling = EngineClient(server.url, silence_seconds=0.2), Sampling()
        with pytest.raises(EngineError, match="sent nothing for too long") as caught:
            assert [ids async for ids in client.sample(REQUEST, sampling)] == [[7]]
        assert caught.value.kind == "silent" and sampling.ids.tolist() == [7]
        await client.close()


async def test_a_server_that_speaks_no_tls_is_not_trusted() -> None:
    async with serving(server := Server(b"no tls")):
        client = EngineClient(server.url.replace("http:", "https:"))
        with pytest.raises(EngineError, match="cannot be trusted|does not answer") as caught:
            async for _ in client.sample(REQUEST, Sampling()):
                pass
        assert caught.value.kind == "unreachable" and isinstance(caught.value.__cause__, ssl.SSLError | OSError)
        await client.close()
