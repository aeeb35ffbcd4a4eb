"""Requests with a header twice, over raw connections, as clients' own libraries would merge or refuse them."""

import asyncio

import msgspec
import pytest

from tests.proxy.conftest import Serve, Stand, user

BODY = msgspec.json.encode({"model": "tiny", "messages": [user("hi \r\n\r\n User-Agent: x")]})
AGENTS = "user-agent: pydantic-ai/1\r\nUser-Agent: google-genai-sdk/1\r\n"


def request(headers: str) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nx-api-key: agent\r\nContent-Length: {len(BODY)}\r\n{headers}\r\n"
    return head.encode() + BODY


async def answers(stand: Stand, requests: list[bytes], size: int) -> list[int]:
    """Statuses of requests on one connection, each sent in pieces of this size after the answer to the one before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stand.url.rpartition(":")[2]))
    statuses = []
    for raw in requests:
        for at in range(0, len(raw), size):
            writer.write(raw[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        head = await reader.readuntil(b"\r\n\r\n")
        statuses.append(int(head.split()[1]))
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        msgspec.json.decode(await reader.readexactly(length))
    writer.close()
    return statuses


@pytest.mark.parametrize("size", [100_000, 7])
async def test_a_second_user_agent_is_left_out(serve: Serve, size: int) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    host, types = "Host: x\r\n", "Content-Type: application/json\r\n" * 2
    thrice = host + AGENTS + types + "User-Agent: z\r\n"
    requests = [request(headers) for headers in (host, host + AGENTS, host, thrice, host + AGENTS)]
    assert await answers(stand, requests, size) == [200] * 5
    assert len(stand.recorded()) == 5


@pytest.mark.parametrize("repeated", ["Host: x\r\nHost: y\r\n", "Host: x\r\nContent-Length: 1\r\n"])
async def test_what_says_where_a_request_goes_or_ends_is_still_unique(serve: Serve, repeated: str) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    for headers in (repeated, AGENTS + repeated):
        assert await answers(stand, [request(headers)], 100_000) == [400]
    assert stand.recorded() == []


async def test_too_many_headers_are_refused_before_and_after_a_repetition(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"headers": 9})
    many = "".join(f"X-{number}: y\r\n" for number in range(9))
    for headers in (many + AGENTS, AGENTS + many):
        assert await answers(stand, [request("Host: x\r\n" + headers)], 100_000) == [431]
