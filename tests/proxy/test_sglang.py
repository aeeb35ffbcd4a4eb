"""The proxy before the real SGLang: what is recorded is what the engine sampled, streamed or not, updated or not."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from proxy.config import EngineConfig
from proxy.engine import repetition
from proxy.engine.client import RESERVED_TOKENS, EngineClient
from proxy.engine.engine_call import EngineError, Sampling, SamplingRequest
from proxy.engine.process import mapped_files
from proxy.engine.sglang import SHARDS, SHARED_FILES, Sglang
from proxy.http.limits import LIMITS
from proxy.pool.completions.records import Completion, VersionSpan
from proxy.pool.inspect.verify import verify
from proxy.prompt.template import ChatTemplate
from proxy.sampling import TRAINING_DISTRIBUTION
from tests.conftest import need
from tests.proxy.conftest import SHELL, Serve, listening, user
from tests.proxy.test_purposes import issued_key


def test_the_bar_of_sglang_is_read() -> None:
    began = "Multi-thread loading shards:   0% Completed | 0/163 [00:00<?, ?it/s]"
    later = "Loading safetensors checkpoint shards:  25% Completed | 41/163 [01:07<03:21,  1.65s/it]"
    assert SHARDS.findall(f"{began}\r{later}") == [("0", "163", "?"), ("41", "163", "03:21")]


@pytest.mark.long
def test_an_engine_says_what_is_loaded_and_leaves_no_files_in_shared_memory_when_it_is_killed(
    tiny_model: Path, tmp_path: Path
) -> None:
    need("sglang", find_spec("sglang") is not None)
    log = tmp_path / "engine.log"
    log.write_text("Loading safetensors checkpoint shards:  25% Completed | 41/163 [01:07<03:21,  1.65s/it]\n")
    engine = Sglang(EngineConfig(model=str(tiny_model), dtype="float32"), log)
    try:
        assert engine.loaded() == ""  # what stands in the log is of the server before this one
        engine.wait_healthy()
        assert engine.loaded() == ", 1 of 1 files of weights, 00:00 left"
        files = mapped_files(engine.pid, SHARED_FILES)
        assert files and all(file.exists() for file in files)
        os.killpg(engine.pid, signal.SIGKILL)
    finally:
        engine.stop()
    assert [file for file in files if file.exists()] == []


class Relay:
    """Passes calls on to the engine and keeps the bytes that the engine sent."""

    def __init__(self, target: str):
        self.target = target
        self.sent: list[bytearray] = []
        """One per call of /generate."""
        self.regex = ""
        """What the engine is to keep to, for answers that a random model never writes."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": request.content_type}
        url, body = self.target + request.path, await request.read()
        if self.regex and request.path == "/generate":
            asked = msgspec.json.decode(body)
            asked["sampling_params"]["regex"] = self.regex
            body = msgspec.json.encode(asked)
        async with aiohttp.request(request.method, url, data=body, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            kept = bytearray()
            if request.path == "/generate":
                self.sent.append(kept)
            async for chunk in answer.content.iter_any():
                kept += chunk
                await response.write(chunk)
        return response

    def events(self) -> list[dict[str, Any]]:
        """The JSON objects of the last answer."""
        lines = [line.removeprefix(b"data: ") for line in self.sent[-1].splitlines()]
        return [msgspec.json.decode(line) for line in lines if line.startswith(b"{")]


@pytest.fixture
async def relay(sglang_engine: Sglang) -> AsyncIterator[tuple[Relay, str]]:
    async with AsyncExitStack() as stack:
        app = web.Application()
        relay = Relay(sglang_engine.url)
        app.router.add_route("*", "/{path:.*}", relay.handle)
        yield relay, await listening(app, stack)


GEMINI = {"contents": [{"parts": [{"text": "hello"}]}], "generationConfig": {"maxOutputTokens": 40}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [user("hello")], "max_tokens": 40, "tools": [SHELL]}),
    "messages": ("/v1/messages", {"messages": [user("hello")], "max_tokens": 40}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 40}),
    "completions": ("/v1/completions", {"prompt": "hello", "max_tokens": 40}),
    "gemini": ("/v1beta/models/tiny:generateContent", GEMINI),
    "gemini streamed": ("/v1beta/models/tiny:streamGenerateContent?alt=sse", GEMINI),
}
CASES: list[Any] = [(*asked, {}) for asked in ASKED.values()]
CASES += [(*asked, {"stream": True}) for name, asked in ASKED.items() if not name.startswith("gemini")]


@pytest.mark.parametrize(("path", "body", "more"), CASES)
async def test_ids_and_logprobs_are_the_engines(
    serve: Serve, relay: tuple[Relay, str], path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    stand = await serve(url=relay[1])
    async with stand.send(path, body | more) as answer:
        assert answer.status == 200 and await answer.read()
    events = relay[0].events()
    (row,) = stand.recorded()
    assert row.sampled.tolist() == [token for event in events for token in event["output_ids"]]
    entries = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    assert row.logprobs.tolist() == pytest.approx([entry[0] for entry in entries], rel=1e-6)
    assert [vars(span) for span in row.versions] == events[-1]["meta_info"]["weight_versions"]
    assert row.untrainable is None and len(row.sampled) > 0


async def test_logprobs_are_those_of_the_recorded_path(serve: Serve, sglang_engine: Sglang) -> None:
    stand = await serve(url=sglang_engine.url)
    await stand.chat(user("hello"), max_tokens=60)
    (row,) = stand.recorded()
    scored = await rescore(sglang_engine, stand.path(), row)
    assert row.logprobs.tolist() == pytest.approx(scored, abs=1e-4)


async def test_the_engine_tells_how_many_calls_wait(serve: Serve, sglang_engine: Sglang) -> None:
    stand = await serve(url=sglang_engine.url)
    async with stand.http.get(f"{stand.url}/health") as answer:
        (replica,) = (await answer.json())["replicas"]
    assert (replica["queue"], replica["accept_length"]) == (0, None)


async def rescore(engine: Sglang, path: list[int], row: Completion) -> list[float]:
    """The engine's own logprobs of the sampled tokens, from a prefill of the whole path."""
    body = {"input_ids": path, "return_logprob": True, "logprob_start_len": row.prompt_length - 1}
    body["sampling_params"] = {"max_new_tokens": 1}
    async with aiohttp.request("POST", f"{engine.url}/generate", json=body) as answer:
        meta = (await answer.json())["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][-len(row.sampled) :]]


async def test_a_model_that_repeats_itself_is_stopped(
    serve: Serve, relay: tuple[Relay, str], sglang_engine: Sglang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model repeats itself when it is greedy, which runs do not allow. So few blocks take a few seconds."""
    monkeypatch.setitem(TRAINING_DISTRIBUTION, "temperature", 0.0)
    monkeypatch.setattr(repetition, "BLOCKS", 8)
    monkeypatch.setattr(repetition, "REPEATED", 7)
    stand = await serve(url=relay[1])
    key = issued_key(stand, "train")
    choice = (await stand.chat(user("hello"), key=key))["choices"][0]
    (row,) = stand.recorded(key)
    assert (choice["finish_reason"], row.finish_reason, row.untrainable) == ("length", "repetition", None)
    events = relay[0].events()
    sampled = [token for event in events for token in event["output_ids"]]
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort" and len(sampled) < 10_000
    assert row.sampled.tolist() == sampled[: len(row.sampled)] and len(row.sampled) % repetition.BLOCK == 0
    assert (row.versions[-1].end, len(row.logprobs)) == (len(row.sampled), len(row.sampled))
    scored = await rescore(sglang_engine, stand.path(key=key), row)
    assert row.logprobs.tolist() == pytest.approx(scored, abs=1e-4)
    await stand.chat(user("hello"), choice["message"], user("go on"), max_tokens=5, key=key)
    assert stand.path(1, key)[: len(stand.path(0, key))] == stand.path(0, key)
    assert verify(stand.pool).damages == []


async def test_the_next_turn_continues_the_sampled_tokens(serve: Serve, sglang_engine: Sglang) -> None:
    stand = await serve(url=sglang_engine.url)
    message = (await stand.chat(user("hello"), max_tokens=30))["choices"][0]["message"]
    await stand.chat(user("hello"), message, user("go on"), max_tokens=5)
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)


async def test_version_spans_across_an_update_in_mid_stream(
    serve: Serve, sglang_engine: Sglang, tiny_model: Path
) -> None:
    stand = await serve(url=sglang_engine.url)
    for attempt in range(20):  # the random model may end its turn before the update
        version = f"update-{attempt}"
        async with stand.post({"messages": [user("talk")], "stream": True, "max_tokens": 500}) as answer:
            await answer.content.readany()
            await update(sglang_engine, tiny_model, version)
            await answer.read()
        row = stand.recorded()[-1]
        if len(row.versions) == 2:
            break
    before, after = row.versions
    assert after.version == version and before.version != version
    assert (before.start, before.end, after.end) == (0, after.start, len(row.sampled))
    assert row.untrainable is None


async def update(engine: Sglang, model: Path, version: str) -> None:
    steps: list[tuple[str, dict[str, Any]]] = [
        ("pause_generation", {"mode": "retract"}),
        ("update_weights_from_disk", {"model_path": str(model), "weight_version": version}),
        ("continue_generation", {}),
    ]
    for route, body in steps:
        async with aiohttp.request("POST", f"{engine.url}/{route}", json=body) as answer:
            assert answer.status == 200, await answer.text()


@pytest.mark.long  # a prefill of 40,000 tokens takes most of a minute on the CPU
async def test_the_context_can_be_filled_to_the_last_token(
    serve: Serve, sglang_engine: Sglang, template: ChatTemplate
) -> None:
    stand = await serve(url=sglang_engine.url, silence=280)
    assert template.context_length is not None
    frame = len(template.encode(template.render([user(" a")], []))) - len(template.encode(" a"))
    answer = await stand.chat(user(" a" * (template.context_length - frame - RESERVED_TOKENS - 2)), max_tokens=32000)
    assert answer["status"] == 200, answer
    row = stand.recorded()[-1]
    assert len(row.sampled) == 2 or row.finish_reason == "stop"
    answer = await stand.chat(user(" a" * (template.context_length - frame - RESERVED_TOKENS)))
    assert (answer["status"], answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_stop_string_ends_the_sampling(serve: Serve, sglang_engine: Sglang, template: ChatTemplate) -> None:
    stand = await serve(url=sglang_engine.url)
    choice = (await stand.chat(user("hello"), max_tokens=400, stop=["e"]))["choices"][0]
    row = stand.recorded()[0]
    assert "e" not in (choice["message"]["content"] or "")
    assert choice["finish_reason"] == "stop" and "e" in template.decode(row.sampled)
    assert isinstance(row.versions[0], VersionSpan) and row.versions[0].end == len(row.sampled)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"top_p": 0}, "engine_refused", "top_p must be in (0, 1]"),
        ({"top_k": 0}, "engine_refused", "top_k must be -1 (disable) or at least 1"),
        ({"stop": ["no"] * 40}, "invalid_request", "stop has 40 entries, and at most 31 are served; send fewer"),
    ],
)
async def test_what_the_engine_refuses_is_no_failure_of_the_engine(
    serve: Serve, sglang_engine: Sglang, stream: bool, fields: dict[str, Any], code: str, words: str
) -> None:
    stand = await serve(url=sglang_engine.url)
    answer = await stand.chat(user("hello"), max_tokens=40, stream=stream, **fields)
    assert (answer["status"], answer["error"]["code"]) == (400, code) and words in answer["error"]["message"]
    async with stand.http.get(f"{stand.url}/health") as health:
        assert [replica["failures"] for replica in (await health.json())["replicas"]] == [0]


async def test_the_engine_takes_one_stop_string_more_than_the_proxy(sglang_engine: Sglang) -> None:
    client = EngineClient(sglang_engine.url)
    ids, stop = b"[20, 21, 22]", ["never"] * (LIMITS.stop_strings + 1)
    request = SamplingRequest(prompt=ids, prompt_length=3, max_new_tokens=2, stop=stop, stream=True)
    sampling = Sampling()
    assert [new async for new in client.sample(request, sampling)] and sampling.finish
    with pytest.raises(EngineError, match="at most 32 stop strings are allowed") as caught:
        await anext(client.sample(replace(request, stop=[*stop, "more"]), Sampling()))
    assert caught.value.kind == "refused"
    await client.close()


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
async def test_of_several_calls_only_the_first_is_kept_where_one_may_be(
    serve: Serve, relay: tuple[Relay, str], template: ChatTemplate, stream: bool
) -> None:
    call = r'<tool_call>\n\{"name": "shell", "arguments": \{"command": "[a-z]{5}"\}\}\n</tool_call>'
    relay[0].regex = rf"I look\.\n({call}\n){{40}}"
    stand = await serve(url=relay[1])
    asked: dict[str, Any] = {"tools": [SHELL], "max_tokens": 4000}
    async with stand.post({"messages": [user("go")], **asked, "parallel_tool_calls": False, "stream": stream}) as got:
        assert got.status == 200 and (await got.read()).count(b'"name":"shell"') == 1
    [row] = stand.recorded()
    ids = [token for event in relay[0].events() for token in event["output_ids"]]
    assert row.sampled.tolist() == ids[: len(row.sampled)] and len(ids) < 1000
    text = template.decode(row.sampled)
    assert text.count("<tool_call>") == 1 and row.finish_reason == "tool_calls"
    before_last = template.decode(row.sampled[:-1])  # the last token completes the mark; it may hold a newline, too
    assert "</tool_call>" in text and "</tool_call>" not in before_last and text.rstrip().endswith("</tool_call>")
    assert (len(row.logprobs), row.versions[-1].end, row.untrainable) == (len(row.sampled), len(row.sampled), None)
    relay[0].regex = rf"({call}\n){{2}}"
    [both] = (await stand.chat(user("go"), **asked))["choices"]  # the engine does write several where it may
    assert len(both["message"]["tool_calls"]) == 2
    assert verify(stand.pool).damages == []


async def test_a_client_that_goes_away_frees_the_engine(serve: Serve, sglang_engine: Sglang) -> None:
    stand = await serve(url=sglang_engine.url, limits={"linger_seconds": 0})
    async with stand.post({"messages": [user("talk")], "stream": True, "max_tokens": 20000}) as answer:
        await answer.content.readany()
    for _ in range(1200):
        if stand.recorded():
            break
        await asyncio.sleep(0.05)
    (row,) = stand.recorded()
    assert str(row.untrainable) == "abandoned" or row.finish_reason == "stop"
    assert len(row.sampled) < 5000 and len(row.logprobs) == len(row.sampled)
