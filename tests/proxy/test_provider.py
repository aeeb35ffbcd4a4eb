"""Another provider's model behind the proxy: served in every dialect, recorded as text, never trained.

The provider is a second gateway before a scripted engine, reached by litellm over loopback. Not covered: the real ones.
"""

import json
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from proxy.call import Call
from proxy.commands.main import main
from proxy.commands.recorded_attempt import AttemptRecording
from proxy.engine.scripted import Fault, Script
from proxy.parsing.turn_parser import Text
from proxy.pool.errors import UserError
from proxy.pool.export.files import export
from proxy.pool.inspect.show import show
from proxy.pool.inspect.verify import verify
from proxy.pool.read import RolloutFilter, rollouts
from proxy.prompt.splice import PromptBuilder
from proxy.prompt.template import ChatTemplate
from proxy.recording.provider import ProviderTurn
from tests.conftest import need
from tests.proxy.conftest import SHELL, Seen, Serve, Stand, listening, shell_call, user
from tests.proxy.test_purposes import issued_key

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning")  # litellm's own


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    need("litellm (pip install blackforge[providers])", find_spec("litellm") is not None)
    monkeypatch.setenv("OPENAI_API_KEY", "teacher")


@pytest.fixture
def behind(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts a gateway whose provider answers by a script."""

    async def start(script: Script, **config: Any) -> Stand:
        provider = await serve(script)
        monkeypatch.setenv("OPENAI_API_BASE", f"{provider.url}/v1")
        return await serve(url="litellm:openai/tiny", **config)

    return start


GEMINI = {"contents": [{"parts": [{"text": "hello"}]}]}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [user("hello")]}),
    ("/v1/messages", {"messages": [user("hello")], "max_tokens": 40, "thinking": {"type": "disabled"}}),
    ("/v1/responses", {"input": "hello"}),
    ("/v1beta/models/tiny:generateContent", GEMINI),
    ("/v1beta/models/tiny:streamGenerateContent?alt=sse", GEMINI),
]
CASES = [*ASKED, *((path, {**body, "stream": True}) for path, body in ASKED[:3])]


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_every_dialect_is_served_and_recorded_as_text(behind: Any, path: str, body: dict[str, Any]) -> None:
    stand = await behind(lambda prompt, ids: "<think>\nwell\n</think>\n\nbonjour")
    async with stand.send(path, body) as answer:
        assert answer.status == 200 and await answer.read()
    (row,) = stand.recorded()
    assert row.reply == {"role": "assistant", "content": "bonjour", "reasoning_content": "well"}
    assert (len(row.sampled), len(row.logprobs), row.versions, row.finish_reason) == (0, 0, (), "stop")
    assert str(row.untrainable).startswith("text_only: ended by")


async def test_tools_and_history_reach_the_provider_and_rows_hang_together(behind: Any) -> None:
    script = Seen(lambda prompt, ids: "done" if "three files" in prompt else shell_call("ls"))
    stand = await behind(script)
    message = (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"command": "ls"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "three files"}
    answer = await stand.chat(user("list"), message, result, tools=[SHELL])
    assert answer["choices"][0]["message"]["content"] == "done"
    assert (
        '"command"' in script.prompts[1]
        and "three files" in script.prompts[1]
        and '"name": "shell"' in script.prompts[0]
    )
    first, second = stand.recorded()
    assert (first.follows, second.follows) == (None, first.id) and first.finish_reason == "tool_calls"
    assert second.prefix_of == first.id and second.prefix_length >= first.prompt_length


async def test_a_recorded_answer_can_be_served_again(behind: Any, template: ChatTemplate) -> None:
    stand = await behind(lambda prompt, ids: "look:\n" + shell_call("ls"))
    message = (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["message"]
    call = Call(model="any", messages=(user("list"),))
    turn = ProviderTurn(call, PromptBuilder(template).build(call, True), template)
    pieces, reply = turn.from_record(stand.recorded()[0])
    assert pieces == [Text(message["content"])] and reply.finish_reason == "tool_calls"
    assert reply.message()["tool_calls"] == message["tool_calls"]


async def test_the_usage_is_the_providers(behind: Any) -> None:
    stand = await behind(lambda prompt, ids: "one two three")
    usage = (await stand.chat(user("count")))["usage"]
    *_, last, _ = await stand.stream(user("count"), stream_options={"include_usage": True})
    (teacher, again) = stand.recorded("teacher")
    assert (
        usage["completion_tokens"] == last["usage"]["completion_tokens"] == len(teacher.sampled) == len(again.sampled)
    )
    assert usage["prompt_tokens"] == stand.recorded("teacher")[0].prompt_length


async def test_limits_and_sampling_are_passed_on(behind: Any) -> None:
    stand = await behind(lambda prompt, ids: "one two three four five", max_new_tokens=2)
    answer = await stand.chat(user("count"), temperature=0.5, top_k=5)
    assert answer["choices"][0]["finish_reason"] == "length"
    (teacher,) = stand.recorded("teacher")
    assert len(teacher.sampled) == 2 and "'temperature': 0.5, 'top_k': 5" in str(teacher.untrainable)


async def test_the_prescribed_form_is_passed_on(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = await serve(lambda prompt, ids: '{"a": 1}', prescribed="grammar")
    monkeypatch.setenv("OPENAI_API_BASE", f"{provider.url}/v1")
    stand = await serve(url="litellm:openai/tiny")
    await stand.chat(user("hello"), response_format={"type": "json_object"})
    assert provider.engine and json.loads(provider.engine.last_params["json_schema"]) == {"type": "object"}
    provider.engine.script = lambda prompt, ids: shell_call("ls")
    named = {"type": "function", "function": {"name": "shell"}}
    await stand.chat(user("hello"), tools=[SHELL], tool_choice=named)
    assert '"stop_after_first":true' in provider.engine.last_params["structural_tag"]
    provider.engine.script = seen = Seen(lambda prompt, ids: shell_call("ls"))
    await stand.chat(user("hello"), tools=[SHELL], tool_choice=named, response_format={"type": "json_object"})
    assert "one JSON object" in seen.prompts[0] and "structural_tag" in provider.engine.last_params


async def test_template_arguments_are_refused(behind: Any) -> None:
    stand = await behind(lambda prompt, ids: "ok")
    answer = await stand.chat(user("hi"), chat_template_kwargs={"style": "x"})
    assert answer["status"] == 400 and "template arguments (style)" in answer["error"]["message"]
    assert stand.recorded() == []


async def test_a_text_completion_is_refused(behind: Any) -> None:
    stand = await behind(lambda prompt, ids: "ok")
    answer = await stand.ask("/v1/completions", {"prompt": "hello"})
    assert answer["status"] == 400 and "send messages" in answer["error"]["message"]


@pytest.mark.parametrize(("fault", "ours"), [(500, 502), (429, 503), (400, 400)])
async def test_a_provider_that_fails(behind: Any, fault: int, ours: int) -> None:
    stand = await behind(lambda prompt, ids: Fault(status=fault))
    answer = await stand.chat(user("hi"))
    assert answer["status"] == ours and "openai/tiny" in answer["error"]["message"] and stand.recorded() == []


async def test_a_provider_that_is_not_there(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_BASE", "http://127.0.0.1:9/v1")
    stand = await serve(url="litellm:openai/tiny")
    answer = await stand.chat(user("hi"))
    assert (answer["status"], answer["error"]["code"]) == (502, "engine_failed")


async def test_a_prompt_that_is_too_long_for_the_provider_starts_the_agents_compaction(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = await serve(lambda prompt, ids: "ok", context_length=100)
    monkeypatch.setenv("OPENAI_API_BASE", f"{provider.url}/v1")
    stand = await serve(url="litellm:openai/tiny")
    answer = await stand.chat(user("word " * 200))
    assert (answer["status"], answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_stream_that_breaks_off_is_kept_as_far_as_it_came(behind: Any) -> None:
    stand = await behind(lambda prompt, ids: Fault(text="one two three four", after=3))
    *_, event, _ = await stand.stream(user("count"))
    assert event["error"]["code"].startswith("engine_")
    (row,) = stand.recorded()
    assert row.reply["content"] and row.finish_reason == "error" and row.untrainable and len(row.sampled) == 0


def calling(finish: str) -> web.Application:
    """A provider that is cut in its third and its fourth call, or says that it was."""
    arguments = ['{"command": "ls"}', "", '{"command": "pw', '{"command": ' + "[" * 5000]
    calls = [
        {"index": i, "id": f"call_{i}", "type": "function", "function": {"name": "shell", "arguments": text}}
        for i, text in enumerate(arguments)
    ]
    said = {"role": "assistant", "content": "I look.", "tool_calls": calls}

    async def answer(request: web.Request) -> web.Response:
        part = "delta" if (await request.json()).get("stream") else "message"
        body = {"id": "x", "created": 1, "model": "tiny", "object": "chat.completion"}
        text = json.dumps({**body, "choices": [{"index": 0, part: said, "finish_reason": finish}]})
        if part == "message":
            return web.Response(text=text, content_type="application/json")
        return web.Response(text=f"data: {text}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    return app


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_call_that_the_length_has_cut_is_left_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    async with AsyncExitStack() as stack:
        monkeypatch.setenv("OPENAI_API_BASE", f"{await listening(calling('length'), stack)}/v1")
        stand = await serve(url="litellm:openai/tiny")
        async with stand.post({"messages": [user("look")], "tools": [SHELL], "stream": stream}) as answer:
            assert answer.status == 200 and '"finish_reason":"length"' in await answer.text()
    (row,) = stand.recorded()
    assert [call["id"] for call in row.reply["tool_calls"]] == ["call_0"] and row.finish_reason == "length"


async def test_a_whole_answer_with_a_broken_call_is_an_error(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncExitStack() as stack:
        monkeypatch.setenv("OPENAI_API_BASE", f"{await listening(calling('tool_calls'), stack)}/v1")
        stand = await serve(url="litellm:openai/tiny")
        answer = await stand.chat(user("look"), tools=[SHELL])
    assert answer["status"] == 502 and "arguments that are no JSON object" in answer["error"]["message"]
    (row,) = stand.recorded()
    assert [call["id"] for call in row.reply["tool_calls"]] == ["call_0", "call_1"] and row.finish_reason == "error"


async def test_the_pools_tools_read_rows_of_text(behind: Any, template: ChatTemplate, tmp_path: Path) -> None:
    stand = await behind(lambda prompt, ids: "bonjour")
    key = issued_key(stand, "collect")
    messages: list[dict[str, Any]] = [user("hello")]
    for _ in range(3):
        messages += [(await stand.chat(*messages, key=key))["choices"][0]["message"], user("and again")]
    rows = stand.recorded(key)
    assert [row.follows for row in rows] == [None, rows[0].id, rows[1].id]
    report = verify(stand.pool)
    assert report.damages == [] and report.completions == 6 and report.trainable == 3  # the provider's own gateway
    every = RolloutFilter(run="a collect run", all_attempts=True)
    [rollout] = rollouts(stand.pool, every)
    assert [item.message["content"] for item in rollout.completions] == ["bonjour"] * 3
    assert all(sum(item.mask) == 0 and len(item.logprobs) == 0 for item in rollout.completions)
    assert export(stand.pool, every, "jsonl", tmp_path / "run.jsonl") == 3
    assert any("text_only" in line and "bonjour" in line for line in show(stand.pool, rows[0].attempt_id))
    with pytest.raises(UserError, match="answered by a provider, as text without token ids"):
        AttemptRecording(stand.pool, rows[0].attempt_id, template, tmp_path / "report.jsonl")


def test_a_provider_that_litellm_does_not_know(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text(f'[engine]\nmodel = "{tiny_model}"\nurl = "litellm:nobody-knows-this"\n')
    assert main(["serve", str(file)]) == 2
    assert "write litellm:PROVIDER/MODEL" in capsys.readouterr().err
