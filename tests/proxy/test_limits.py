"""The limits of one request: beyond each, it is refused with the right status in its dialect's format, unrecorded."""

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import brotli
import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from proxy.commands.main import main
from proxy.http.limits import has_more_values, nests_deeper
from tests.proxy.conftest import SHELL, Serve, Stand, user

HELLO: dict[str, Any] = {"messages": [user("hi")]}


def chat(**fields: Any) -> bytes:
    return msgspec.json.encode({**HELLO, **fields})


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"a": parameters}}}


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": arguments}}}]}


@pytest.mark.parametrize(
    ("limits", "body", "status", "words"),
    [
        ({"body_bytes": 200}, chat(user="x" * 300), 413, "larger than 200 bytes"),
        ({"nesting": 9}, chat(chat_template_kwargs={"a": nested(9)}), 400, "more than 9 levels"),
        ({"nesting": 9}, chat(tools=[tool(nested(8))]), 400, "more than 9 levels"),
        ({"nesting": 9}, chat(messages=[calling(nested(8)), user("hi")]), 400, "more than 9 levels"),
        ({"values": 40}, chat(tools=[tool([0] * 40)]), 400, "more than 40 values"),
        ({"values": 40}, chat(messages=[calling("x"), user("hi"), calling([{}] * 40)]), 400, "more than 40 values"),
        ({"values": 40}, chat(chat_template_kwargs={"a": list(range(40))}), 400, "more than 40 values"),
        ({"messages": 2}, chat(messages=[user("hi")] * 3), 400, "messages has 3 entries, and at most 2"),
        ({"tools": 2}, chat(tools=[SHELL] * 3), 400, "tools has 3 entries, and at most 2"),
        ({"stop_strings": 2}, chat(stop=["a", "b", "c"]), 400, "stop has 3 entries, and at most 2"),
        ({}, chat(stop=["a"] * 32), 400, "stop has 32 entries, and at most 31"),
        ({"stop_chars": 5}, chat(stop=["abc", "def"]), 400, "stop has 6 characters, and at most 5"),
        ({}, chat(stop="x" * 1_000_000), 400, "stop has 1000000 characters, and at most 2048"),
        ({}, chat(top_k=2**40), 400, "top_k is 1099511627776"),
        ({}, chat(top_k=1)[:-1] + b"0" * 400 + b"}", 400, "send a number within 32 bits"),
    ],
)
async def test_too_much_is_refused(serve: Serve, limits: Any, body: bytes, status: int, words: str) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits=limits)
    answer = await stand.ask("/v1/chat/completions", body)
    assert answer["status"] == status and words in answer["error"]["message"]
    assert stand.recorded() == []


async def test_just_within_the_limits_is_served(serve: Serve) -> None:
    stand = await serve(
        lambda prompt, ids: "ok", limits={"nesting": 9, "messages": 2, "tools": 2, "stop_strings": 2, "stop_chars": 2}
    )
    kwargs = {"a": nested(8)}
    tools = [SHELL, tool(nested(6))]
    body = chat(messages=[calling(nested(6)), user("hi")], tools=tools, stop=["a", "b"], chat_template_kwargs=kwargs)
    assert (await stand.ask("/v1/chat/completions", body))["status"] == 200


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/chat/completions", {"type": "invalid_request_error", "code": "request_too_large", "param": None}),
        ("/v1/responses", {"type": "invalid_request_error", "code": "request_too_large", "param": None}),
        ("/v1/completions", {"type": "invalid_request_error", "code": "request_too_large", "param": None}),
        ("/v1/messages", {"type": "request_too_large"}),
        ("/v1beta/models/m:generateContent", {"code": 413, "status": "INVALID_ARGUMENT"}),
    ],
)
async def test_every_dialect_refuses_in_its_form(serve: Serve, path: str, form: dict[str, Any]) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"body_bytes": 200})
    answer = await stand.ask(path, b" " * 300)
    assert answer["status"] == 413 and answer["error"].pop("message") and answer["error"] == form


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": partial(brotli.compress, quality=1),
    "zstd": zstandard.compress,
}


@pytest.mark.parametrize("encoding", [*PACK, "GZip"])
async def test_a_compressed_body_is_read(serve: Serve, encoding: str) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    answer = await stand.ask("/v1/chat/completions", PACK[encoding.lower()](chat()), **{"Content-Encoding": encoding})
    assert answer["status"] == 200


@pytest.mark.parametrize("encoding", PACK)
async def test_a_body_that_grows_is_stopped_at_the_limit(serve: Serve, encoding: str) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"body_bytes": 1 << 20})
    bomb = PACK[encoding](bytes(1 << 26))
    assert len(bomb) < 1 << 17
    tracemalloc.start()
    answer = await stand.ask("/v1/chat/completions", bomb, **{"Content-Encoding": encoding})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer["status"] == 413 and "larger than 1048576 bytes" in answer["error"]["message"]
    assert peak < (1 << 27 if encoding == "zstd" else 1 << 24)  # zstd comes in pieces of up to 32 MiB


@pytest.mark.parametrize("encoding", ["br, gzip", "gzip, gzip", "aes128gcm", "compress"])
async def test_other_encodings_are_a_415(serve: Serve, encoding: str) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    answer = await stand.ask("/v1/messages", chat(), **{"Content-Encoding": encoding})
    assert answer["status"] == 415 and answer["error"]["message"] and stand.recorded() == []


@pytest.mark.parametrize("encoding", PACK)
async def test_a_body_that_is_not_of_its_encoding(serve: Serve, encoding: str) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    for body in (b"not packed at all", PACK[encoding](chat())[:-12]):
        answer = await stand.ask("/v1/chat/completions", body, **{"Content-Encoding": encoding})
        assert answer["status"] == 400 and answer["error"]["message"]


async def test_a_body_that_does_not_come_is_a_408(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"body_seconds": 0.2})
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    status, answer = await exchanged(stand, head + b'{"mess')
    assert status == 408 and answer["type"] == "error" and "within 0.2 s" in answer["error"]["message"]


@pytest.mark.parametrize("line", ["GET /v1/models?{} HTTP/1.1\r\n", "GET /v1/models HTTP/1.1\r\nx: {}\r\n"])
async def test_a_long_line_is_a_431(serve: Serve, line: str) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"header_bytes": 5000})
    head = "Host: x\r\nConnection: close\r\n\r\n"
    assert (await exchanged(stand, (line.format("a" * 4000) + head).encode()))[0] == 200
    status, answer = await exchanged(stand, (line.format("a" * 6000) + head).encode())
    assert status == 431 and "over 5000 bytes" in answer["error"]["message"]


async def test_many_headers_are_a_431(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"headers": 20})
    for count, expected in ((10, 200), (30, 431)):
        headers = "".join(f"X-{number}: 1\r\n" for number in range(count))
        status, answer = await exchanged(stand, f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())
        assert status == expected
    assert "more than 20 headers" in answer["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: -4\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer bf-secret\x00key\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_400(serve: Serve, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    status, answer = await exchanged(stand, raw)
    assert status == 400 and answer["error"]["message"] == "the request is not valid HTTP; send HTTP/1.1"
    assert "bf-secret" not in caplog.text


async def test_broken_chunks_are_a_400(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, answer = await exchanged(stand, head + b"5\r\nhello\r\nzz\r\n")
    assert status == 400 and answer["error"]["message"]


async def exchanged(stand: Stand, raw: bytes) -> tuple[int, Any]:
    """Send these bytes and return status and JSON of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stand.url.rpartition(":")[2]))
    writer.write(raw)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), msgspec.json.decode(body)


JSON = st.recursive(
    st.none() | st.text(alphabet='a"\\[]{}\n\u00e9', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"\\[{', max_size=2), inner, max_size=3),
)


def levels_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(levels_of, inner), default=0)


@given(value=JSON)
def test_the_depth_of_any_json(value: Any) -> None:
    levels = levels_of(value)
    assert not nests_deeper([value], levels)
    assert levels == 0 or nests_deeper([value], levels - 1)


def values_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values_of, inner))


@given(value=JSON)
def test_the_values_of_any_json(value: Any) -> None:
    values = values_of(value)
    assert not has_more_values([value], values)
    assert has_more_values([value], values - 1)


DEEP: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [user("hi")], "tools": [tool(0)]},
    "/v1/responses": {
        "input": "x",
        "tools": [{"type": "function", "name": "f", "parameters": 0}],
        "tool_choice": "none",
    },
    "/v1/messages": {"messages": [user("hi")], "tools": [{"name": "f", "input_schema": {"a": 0}}]},
    "/v1beta/models/m:generateContent": {
        "contents": [{"parts": [{"text": "hi"}]}],
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"a": 0}}]}],
    },
}


@pytest.mark.parametrize("levels", [199, 300, 450, 700, 950, 5000])
@pytest.mark.parametrize("path", DEEP)
async def test_any_depth_is_a_400_in_every_dialect(serve: Serve, path: str, levels: int) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    body = msgspec.json.encode(DEEP[path]).replace(b":0", b":" + b'{"a":' * levels + b"1" + b"}" * levels)
    answer = await stand.ask(path, body)
    assert answer["status"] == 400 and answer["error"]["message"] and stand.recorded() == []


@pytest.mark.parametrize("line", ["max_calls = 0", "max_calls = 'all'", "words = 3"])
def test_a_limit_that_is_none(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "proxy.toml"
    config.write_text(f"[engine]\nmodel = 'm'\n[proxy]\n{line}\n")
    assert main(["serve", str(config)]) == 2
    assert line.split()[0] in capsys.readouterr().err
