"""Chat completions with a scripted engine, streamed and not: the agent gets what is recorded."""

from typing import Any

import msgspec
import openai

from proxy.engine.scripted import ScriptedReply
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import SHELL, Seen, Serve, shell_call, user
from tests.proxy.test_purposes import issued_key


async def test_answers_and_records_the_same_tokens(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(lambda prompt, ids: "hello there")
    answer = await stand.chat(user("hi"))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello there"}
    (row,) = stand.recorded()
    assert template.decode(row.sampled) == "hello there<|im_end|>"
    assert row.untrainable is None and list(row.logprobs) == [0.0] * len(row.sampled)


async def test_usage_counts_the_recorded_tokens(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "hello there")
    usage = (await stand.chat(user("hi")))["usage"]
    (row,) = stand.recorded()
    assert usage["prompt_tokens"] == len(row.prompt_tail)
    assert usage["completion_tokens"] == len(row.sampled)


async def test_a_stream_says_the_same_in_pieces(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "one two three")
    *events, usage, done = await stand.stream(user("count"), stream_options={"include_usage": True})
    deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(deltas) == "one two three" and len([d for d in deltas if d]) > 1
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == len(stand.recorded()[0].sampled) and done == "[DONE]"


async def test_tool_calls_come_out_whole(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "I look.\n" + shell_call("ls -l"))
    message = (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["message"]
    assert message["content"] == "I look."
    function = message["tool_calls"][0]["function"]
    assert (function["name"], msgspec.json.decode(function["arguments"])) == ("shell", {"command": "ls -l"})


async def test_streamed_tool_calls_leave_with_the_finish(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: shell_call("ls") + shell_call("pwd"))
    *events, _ = await stand.stream(user("list"), tools=[SHELL])
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert stand.recorded()[0].reply["tool_calls"][1]["id"] == calls[1]["id"]


async def test_without_tools_a_call_is_text(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: shell_call("ls"))
    choice = (await stand.chat(user("list")))["choices"][0]
    assert choice["message"]["content"] == shell_call("ls")
    assert choice["finish_reason"] == "stop"


async def test_reasoning_is_a_field_of_its_own(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "<think>\nhm\n</think>\n\nyes")
    message = (await stand.chat(user("sure?")))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")


async def test_the_length_limit_is_the_smallest_of_all(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "a b c d e f g h i j", max_new_tokens=5)
    choice = (await stand.chat(user("letters"), max_tokens=3))["choices"][0]
    assert choice["finish_reason"] == "length" and len(stand.recorded()[0].sampled) == 3
    await stand.chat(user("letters"), max_completion_tokens=30)
    assert len(stand.recorded()[1].sampled) == 5


async def test_a_stop_string_is_cut_from_the_text_only(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(lambda prompt, ids: "one two STOP three")
    events = await stand.stream(user("count"), stop="STOP")
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "one two "
    assert template.decode(stand.recorded()[0].sampled).endswith("one two STOP")


async def test_the_prompt_is_the_models_template(serve: Serve, template: ChatTemplate) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    stand = await serve(seen)
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    await stand.chat({"role": "developer", "content": "be brief"}, {"role": "user", "content": parts})
    expected = [{"role": "system", "content": "be brief"}, user("hello")]
    assert seen.prompts == [template.render(expected, [])]


async def test_the_openai_client_works_unmodified(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply("fine. " + shell_call("ls"), tokens_per_event=3))
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="agent") as client:
        create: Any = client.chat.completions.create
        whole = await create(model="m", messages=[user("x")], tools=[SHELL])
        stream = await create(model="m", messages=[user("x")], tools=[SHELL], stream=True)
        deltas = [event.choices[0].delta async for event in stream]
    assert whole.choices[0].message.content == "".join(delta.content or "" for delta in deltas) == "fine."
    assert [delta.tool_calls[0].function.name for delta in deltas if delta.tool_calls] == ["shell"]
    assert len(stand.recorded()) == 2


async def test_azures_client_works_unmodified(serve: Serve) -> None:
    """It gives its key as `api-key` and names the model in the path."""
    stand = await serve(lambda prompt, ids: "fine.")
    key = issued_key(stand, "train")
    azure = openai.AsyncAzureOpenAI(azure_endpoint=stand.url, api_key=key, api_version="2024-10-21")
    async with azure as client:
        answer = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])
    (row,) = stand.recorded(key)
    assert answer.choices[0].message.content == "fine." and row.untrainable is None and len(row.logprobs) > 0


async def test_any_prefix_and_a_key_in_the_path(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    body = {"messages": [user("hi")]}
    for prefix in ("/some/where/v1", "/r/attempt-7/v1", "/v1"):
        async with stand.http.post(f"{stand.url}{prefix}/chat/completions", json=body) as answer:
            assert answer.status == 200
    assert len(stand.recorded("attempt-7")) == 1
    assert len(stand.recorded("")) == 2


async def test_models_and_health_name_the_model(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    async with stand.http.get(f"{stand.url}/v1/models") as answer:
        listed = (await answer.json())["data"]
    assert listed[0]["id"] == "tiny"
    async with stand.http.get(f"{stand.url}/v1/models/tiny") as answer:
        assert await answer.json() == listed[0]
    async with stand.http.get(f"{stand.url}/health") as answer:
        health = await answer.json()
    assert health["engine"]["ok"] and health["pool"] == stand.pool.url
    assert health["context_length"] == 40960


async def test_no_reasoning_effort_turns_thinking_off(serve: Serve) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    stand = await serve(seen)
    await stand.chat(user("hi"), reasoning_effort="none")
    await stand.chat(user("hi"), reasoning_effort="low")
    assert "<think>\n\n</think>" in seen.prompts[0] and "<think>" not in seen.prompts[1]
