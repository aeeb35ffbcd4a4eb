"""Bodies that nobody meant: whatever a client sends, in any dialect, it gets an answer and never a 5xx of ours."""

from collections import Counter
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from proxy.call import CallError
from proxy.dialects import chat, completions, gemini, messages, responses
from proxy.dialects.base import Dialect
from proxy.template import ChatTemplate, TemplateError
from tests.proxy.conftest import Serve

PATHS: dict[str, Dialect] = {
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/responses": responses,
    "/v1/completions": completions,
    "/v1beta/models/m:generateContent": gemini,
}
WORDS = [
    *("messages", "input", "contents", "prompt", "role", "content", "parts", "type", "text", "tools", "name", "stop"),
    *("function", "parameters", "tool_calls", "arguments", "tool_choice", "system", "thinking", "input_schema", "id"),
    *("functionCall", "functionResponse", "response", "args", "generationConfig", "systemInstruction", "encrypted"),
    *("user", "assistant", "tool", "model", "message", "function_call", "custom_tool_call", "reasoning", "namespace"),
    *("tool_use", "tool_result", "input_text", "output_text", "functionDeclarations", "thoughtSignature", "summary"),
    *("function_call_output", "call_id", "output", "custom", "format", "stream_options", "max_tokens", "temperature"),
]
LEAVES = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.sampled_from(WORDS) | st.text(max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=20,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "model", "system"])},
    optional={name: VALUES for name in ("content", "parts", "tool_calls", "type", "output", "call_id", "summary")},
)
LISTS = st.lists(MESSAGE | VALUES, min_size=1, max_size=4)
BODIES = st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=4).flatmap(
    lambda rest: LISTS.map(lambda items: {"messages": items, "input": items, "contents": items, "prompt": "x", **rest})
)


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=100, deadline=None)
@given(body=BODIES | VALUES)
def test_every_body_is_read_or_refused(path: str, body: Any, template: ChatTemplate) -> None:
    dialect = PATHS[path]
    if dialect is gemini and isinstance(body, dict):
        known = ("contents", "tools", "generationConfig", "systemInstruction")
        body = {name: value for name, value in body.items() if name in known}
    try:
        call = dialect.read(msgspec.json.encode(body), path)
        if call.prompt is None:
            template.render(call.messages, call.tools, **call.options)
        assert all(isinstance(message.get("content"), str) for message in call.messages)
        dialect.Stream(call, 1).opening()
    except CallError as error:
        assert error.status == 400 and msgspec.json.encode(dialect.error(error))
    except TemplateError as error:
        assert "refuses these messages" in str(error)


DEEP = [b"[" * 5000, b'{"a":' * 3000, b'{"messages":[{"role":"user","content":"x"}],"x":' + b"[" * 3000]
BROKEN = [b"", b"null", b"\xff\xfe", b"{}", b'{"input": "\\ud800"}', b'{"prompt": "\\ud800"}', b'{"model": 1}']


@pytest.mark.parametrize("path", PATHS)
async def test_broken_bodies_are_a_400_in_the_dialects_form(serve: Serve, path: str) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    for body in [*DEEP, *BROKEN]:
        answer = await stand.ask(path, body)
        assert answer["status"] == 400 and answer["error"]["message"]
    assert stand.recorded() == []


async def test_odd_but_whole_requests_are_served(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    odd: dict[str, Any] = {
        "/v1/chat/completions": {"messages": [{"role": "tool", "content": None}], "n": 1, "unknown": {"a": []}},
        "/v1/messages": {"messages": [{"role": "user", "content": []}], "system": []},
        "/v1/responses": {"input": [{"type": "function_call_output", "call_id": "?", "output": ""}]},
        "/v1/completions": {"prompt": " "},
        "/v1beta/models/m:generateContent": {"contents": [{"parts": []}]},
    }
    for path, body in odd.items():
        assert (await stand.ask(path, body))["status"] in (200, "completed"), path
    assert len(stand.recorded()) == len(odd)


@settings(max_examples=4, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(bodies=st.lists(BODIES | VALUES, min_size=40, max_size=60))
async def test_no_body_brings_down_a_real_gateway(serve: Serve, bodies: list[Any]) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    seen = Counter[int]()
    for body, path in product(bodies, PATHS):
        async with stand.send(path, msgspec.json.encode(body)) as answer:
            seen[answer.status] += 1
            assert answer.status in (200, 400), (path, body, await answer.text())
    assert seen[400] > seen[200] > 10
