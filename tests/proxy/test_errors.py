"""Errors: each is one sentence in OpenAI's format, and sampled tokens are neither lost nor trained by mistake."""

import asyncio
import resource
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.commands.main import main
from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.engine_call import Sampling, SamplingRequest
from proxy.engine.replicas.fleet import Fleet, Route
from proxy.engine.replicas.replica import Origin
from proxy.engine.scripted import Fault, ScriptedEngine, ScriptedReply
from proxy.pool.database import open_pool
from proxy.pool.rollouts.attempts import Ending, by_key, close_attempt
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from tests.proxy.conftest import SHELL, Serve, Stand, listening, user

ABANDONED = Untrained(UntrainedReason.ABANDONED)
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"response_format": {"type": "json_schema"}, "tools": [SHELL]}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(serve: Serve, fields: dict[str, Any], param: str) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    async with stand.post({"messages": [user("hi")], **fields}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(param) and stand.recorded() == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 1}', b'{"messages": [{}]}', b"\xff"])
async def test_a_body_that_is_no_request_is_a_400(serve: Serve, body: bytes) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    async with stand.post(body) as answer:
        assert answer.status == 400
        assert "not a chat completion request" in (await answer.json())["error"]["message"]


async def test_an_unknown_path_says_what_is_served(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    async with stand.http.post(f"{stand.url}/v1/embeddings", json={}) as answer:
        assert answer.status == 404 and "chat/completions" in (await answer.json())["error"]["message"]


async def test_a_prompt_longer_than_the_context(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", context_length=20)
    answer = await stand.chat(user("word " * 50))
    assert (answer["status"], answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 12 tokens" in answer["error"]["message"]


async def test_a_closed_attempt_is_refused(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(user("hi"))
    attempt = by_key(stand.pool, "agent")
    assert attempt is not None
    close_attempt(stand.pool, attempt.id, Ending())
    answer = await stand.chat(user("again"))  # the proxy still believes it open: the pool's answer counts
    assert answer["status"] == 401 and "has ended" in answer["error"]["message"]
    assert len(stand.recorded()) == 1


async def test_only_issued_keys_off_loopback(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", host="0.0.0.0")
    assert (await stand.chat(user("hi"), key="stranger"))["status"] == 401
    assert by_key(stand.pool, "stranger") is None


async def test_an_issued_key_of_another_pool(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    answer = await stand.chat(user("hi"), key="bf-of-another-pool")
    assert answer["status"] == 401 and "has not issued this key" in answer["error"]["message"]


async def test_an_engine_that_is_not_there(serve: Serve) -> None:
    stand = await serve(url="http://127.0.0.1:9")
    async with stand.post({"messages": [user("hi")]}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"], answer.headers["Retry-After"]) == (503, "engine_unreachable", "1")
    assert "proxy engine" in error["message"] and stand.recorded() == []


@pytest.mark.parametrize(("status", "ours"), [(500, 502), (400, 400)])
async def test_an_engine_that_refuses(serve: Serve, status: int, ours: int) -> None:
    stand = await serve(lambda prompt, ids: Fault(status=status))
    answer = await stand.chat(user("hi"))
    assert answer["status"] == ours and f"HTTP {status}" in answer["error"]["message"]


class Buggy(Route):
    """Yields tokens, then fails like a bug."""

    async def sample(self, request: SamplingRequest, into: Sampling) -> AsyncGenerator[list[int], None]:
        async for ids in super().sample(request, into):
            yield ids
            raise ZeroDivisionError


class BuggyFleet(Fleet):
    def route(self, origin: Origin) -> Route:
        return Buggy(self, origin)


class BuggyGateway(Gateway):
    def fleet(self) -> Fleet:
        return BuggyFleet(self.engines)


async def test_a_bug_in_mid_stream_ends_the_stream(tiny_model: Path, tmp_path: Path) -> None:
    config = ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=str(tmp_path / "pool.db"))
    engine = ScriptedEngine(lambda prompt, ids: ScriptedReply("one two three"), ChatTemplate(tiny_model))
    async with AsyncExitStack() as stack:
        url = await listening(BuggyGateway(config, await listening(engine.app(), stack)).app(), stack)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        stand = Stand(url, open_pool(config.pool), http)
        first, *_, event, done = await stand.stream(user("count"))
        assert first["choices"] and event["error"]["code"] == "internal_error" and done == "[DONE]"
        assert (await stand.chat(user("count")))["error"]["code"] == "internal_error"
        for row in stand.recorded():
            assert (row.finish_reason, row.untrainable, len(row.sampled) > 0) == ("abort", ABANDONED, True)
        assert len(stand.recorded()) == 2


async def test_an_engine_that_dies_in_mid_stream(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: Fault(text="one two three four", after=3))
    *_, event, done = await stand.stream(user("count"))
    assert event["error"]["code"] == "engine_died" and done == "[DONE]"
    (row,) = stand.recorded()
    assert len(row.sampled) == 3 and row.finish_reason == "error"
    assert row.untrainable is not None and str(row.untrainable).startswith("engine_failed: died")


async def test_an_engine_that_falls_silent(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: Fault(text="one two", after=1, hang=True), silence=3)
    *_, event, _ = await stand.stream(user("count"))
    assert event["error"]["code"] == "engine_silent"
    assert stand.recorded()[0].finish_reason == "error"


async def test_an_engine_without_logprobs(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply("hello", logprobs=0))
    answer = await stand.chat(user("hi"))
    assert answer["status"] == 502 and "0 logprobs for" in answer["error"]["message"]
    assert str(stand.recorded()[0].untrainable).startswith("engine_failed: no_logprobs")


async def test_a_client_that_goes_away(serve: Serve) -> None:
    slow = ScriptedReply("word " * 200, seconds_per_token=0.02)
    stand = await serve(lambda prompt, ids: slow, limits={"linger_seconds": 0})
    async with stand.post({"messages": [user("hi")], "stream": True}) as answer:
        await answer.content.readany()
    row = await recorded(stand)
    assert (row.finish_reason, row.untrainable) == ("abort", ABANDONED)
    assert 0 < len(row.sampled) == len(row.logprobs)
    assert stand.engine is not None and stand.engine.aborted == 1


async def test_a_client_that_goes_away_unstreamed(serve: Serve) -> None:
    slow = ScriptedReply("word " * 20, seconds_per_token=1)
    stand = await serve(lambda prompt, ids: slow, limits={"linger_seconds": 0})
    asking = asyncio.create_task(stand.chat(user("hi")))
    while stand.engine is None or not stand.engine.calls:
        await asyncio.sleep(0.01)
    asking.cancel()
    assert (await recorded(stand)).finish_reason == "abort"


async def recorded(stand: Stand) -> Any:
    for _ in range(1200):
        if stand.recorded():
            return stand.recorded()[0]
        await asyncio.sleep(0.05)
    raise AssertionError("nothing was recorded")


async def test_a_full_disk_fails_the_call_and_leaves_nothing(serve: Serve, tmp_path: Path) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(user("hi"))
    with no_file_grows(tmp_path / "pool.db-wal"):
        answer = await stand.chat(user("second " * 2000))
    assert (answer["status"], answer["error"]["code"]) == (507, "pool_write_failed")
    await stand.chat(user("third"))
    assert [row.ordinal for row in stand.recorded()] == [0, 1]


async def test_a_full_disk_while_an_engine_fails_still_ends_the_stream(serve: Serve, tmp_path: Path) -> None:
    stand = await serve(lambda prompt, ids: Fault(text="one two three four", after=3))
    await stand.chat(user("hi"))
    with no_file_grows(tmp_path / "pool.db-wal"):
        *_, event, done = await stand.stream(user("second " * 2000))
    assert event["error"]["code"] == "pool_write_failed" and done == "[DONE]"


async def test_a_pool_that_is_deleted_acknowledges_nothing(serve: Serve, tmp_path: Path) -> None:
    """1,399 answers were once acknowledged and lost."""
    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(user("hi"))
    (tmp_path / "pool.db").rename(tmp_path / "kept.db")
    answer = await stand.chat(user("second"))
    assert (answer["status"], answer["error"]["code"]) == (507, "pool_write_failed")
    assert "was deleted, moved or replaced" in answer["error"]["message"]
    (tmp_path / "kept.db").rename(tmp_path / "pool.db")
    assert (await stand.chat(user("third")))["status"] == 200


async def test_a_full_disk_opens_no_session(serve: Serve, tmp_path: Path) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(user("hi"))
    with no_file_grows(tmp_path / "pool.db-wal"):
        answer = await stand.chat(user("hi"), key="stranger")
    assert (answer["status"], answer["error"]["code"]) == (507, "pool_write_failed")
    assert (await stand.chat(user("hi"), key="stranger"))["status"] == 200


@contextmanager
def no_file_grows(file: Path) -> Iterator[None]:
    """Act like a full disk: writes beyond the present size of this file fail in the whole process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_other_sampling_in_a_session_is_not_trained(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(user("hi"), temperature=0)
    await stand.chat(user("hi"), temperature=1)
    cold, warm = stand.recorded()
    assert "temperature" in str(cold.untrainable) and warm.untrainable is None


def test_a_port_in_use(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "proxy.toml"
    config.write_text(f'[engine]\nmodel = "{tiny_model}"\nurl = "http://127.0.0.1:9"\n')
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", str(config), "--port", str(taken.getsockname()[1])]) == 2
    assert "set port 0 for a free one" in capsys.readouterr().err
