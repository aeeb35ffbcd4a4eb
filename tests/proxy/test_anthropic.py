"""Anthropic Messages with a scripted engine: its events, its errors, and turns that continue with recorded ids."""

from typing import Any

import anthropic
import pytest

from proxy.engine.scripted import Fault, ScriptedReply
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import SHELL, Seen, Serve, Stand, shell_call, user

TOOL = {"name": "shell", "description": "run a command", "input_schema": SHELL["function"]["parameters"]}  # type: ignore[index]
THOUGHT = "<think>\nlook first\n</think>\n\nI look.\n" + shell_call("ls") + "\n" + shell_call("pwd")


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 500, "messages": list(messages), "tools": [TOOL], **fields}


async def ask(stand: Stand, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return await stand.ask("/v1/messages", body(*messages, **fields))


def script(prompt: str, ids: Any) -> str:
    return "done" if "<tool_response>" in prompt else THOUGHT


def results(content: list[dict[str, Any]], *more: dict[str, Any]) -> dict[str, Any]:
    """The user message with a result for every tool call."""
    results = [{"type": "tool_result", "tool_use_id": b["id"], "content": b["name"]} for b in content if "input" in b]
    return {"role": "user", "content": [*results, *more]}


async def test_a_whole_answer_has_thinking_text_and_calls(serve: Serve) -> None:
    answer = await ask(await serve(script), user("list"))
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][0]["thinking"] == "look first" and answer["content"][3]["input"] == {"command": "pwd"}
    assert answer["stop_reason"] == "tool_use"


async def test_the_second_turn_continues_with_recorded_ids(serve: Serve) -> None:
    stand = await serve(script)
    content = (await ask(stand, user("list")))["content"]
    await ask(stand, user("list"), {"role": "assistant", "content": content}, results(content))
    first, second = stand.recorded()
    assert second.follows == first.id and stand.path(1)[: len(stand.path(0))] == stand.path(0)


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_assistant_messages_in_a_row_are_one_turn(serve: Serve, cut: int) -> None:
    stand = await serve(script)
    content = (await ask(stand, user("list")))["content"]
    split = [{"role": "assistant", "content": part} for part in (content[:cut], content[cut:])]
    await ask(stand, user("list"), *split, results(content))
    first, second = stand.recorded()
    assert second.follows == first.id and stand.path(1)[: len(stand.path(0))] == stand.path(0)


async def test_a_text_and_a_call_in_a_row_are_one_turn(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "done" if "<tool_response>" in prompt else "I look.\n" + shell_call("ls"))
    text, call = (await ask(stand, user("list")))["content"]
    split = [{"role": "assistant", "content": part} for part in (text["text"], [call])]
    await ask(stand, user("list"), *split, results([call]))
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)


async def test_a_word_of_the_user_behind_the_results_is_a_turn_of_its_own(serve: Serve) -> None:
    seen = Seen(lambda prompt, ids: shell_call("ls") + shell_call("pwd"))
    stand = await serve(seen)
    content = (await ask(stand, user("list")))["content"]
    turn = results(content, {"type": "text", "text": "go on"})
    await ask(stand, user("list"), {"role": "assistant", "content": content}, turn)
    assert seen.prompts[1].count("<tool_response>") == 2 and "<|im_start|>user\ngo on<|im_end|>" in seen.prompts[1]
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)


async def test_numbers_as_javascript_writes_them_are_the_same_call(serve: Serve) -> None:
    wait = '<tool_call>\n{"name": "wait", "arguments": {"seconds": 2.0}}\n</tool_call>'
    stand = await serve(lambda prompt, ids: "done" if "<tool_response>" in prompt else wait)
    content = (await ask(stand, user("wait")))["content"]
    content[0]["input"]["seconds"] = 2
    await ask(stand, user("wait"), {"role": "assistant", "content": content}, results(content))
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)


async def test_the_prompt_is_the_models_template(serve: Serve, template: ChatTemplate) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    cached = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}
    turn = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t", "name": "shell", "input": {"command": "ls"}}],
    }
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "text", "text": "file"}],
        "is_error": True,
    }
    await ask(await serve(seen), user("list"), turn, user([result]), system=[cached])  # type: ignore[arg-type]
    call = {"function": {"name": "shell", "arguments": {"command": "ls"}}}
    expected = [{"role": "system", "content": "be brief"}, user("list"), {"role": "assistant", "tool_calls": [call]}]
    assert seen.prompts == [template.render([*expected, {"role": "tool", "content": "file"}], [SHELL])]


async def test_the_events_of_a_stream(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "<think>\nhm\n</think>\n\nyes " + shell_call("ls"))
    events = await stand.events("/v1/messages", body(user("list"), stream=True))
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", "ping", *block * 3, "message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == len(stand.recorded()[0].sampled)


async def test_anthropics_client_reads_both_alike(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply(THOUGHT, tokens_per_event=3))
    async with anthropic.AsyncAnthropic(base_url=stand.url, api_key="agent") as client:
        fields: Any = {"model": "m", "max_tokens": 500, "messages": [user("list")], "tools": [TOOL]}
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="m", messages=[user("list")], tools=[TOOL])  # type: ignore
    no_ids = {"content": {"__all__": {"id"}}, "id": True}
    assert whole.model_dump(exclude=no_ids) == streamed.model_dump(exclude=no_ids)  # type: ignore[arg-type]
    assert len(stand.recorded()) == 2 and counted.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropics_tool_loop_sends_its_whole_history(serve: Serve, stream: bool) -> None:
    stand = await serve(script)

    @anthropic.beta_async_tool
    async def shell(command: str) -> str:
        """Run a command."""
        return command

    async with anthropic.AsyncAnthropic(base_url=stand.url, api_key="agent") as client:
        fields: Any = {"model": "m", "max_tokens": 500, "system": "be brief", "messages": [user("list")]}
        last = await client.beta.messages.tool_runner(**fields, tools=[shell], stream=stream).until_done()
    first, second = stand.recorded()
    assert last.content[0].text == "done" and second.follows == first.id
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)


async def test_a_thread_is_refused_with_the_code_that_clients_know(serve: Serve) -> None:
    stand = await serve(script)
    async with anthropic.AsyncAnthropic(base_url=stand.url, api_key="agent") as client:
        with pytest.raises(anthropic.types.ThreadUnsupportedRequestError, match="send the whole conversation"):
            await client.beta.messages.thread(model="m", max_tokens=9).send(user("hi"))
    assert stand.recorded() == []


async def test_a_history_that_ends_with_an_answer_can_be_counted(serve: Serve) -> None:
    stand = await serve(script)
    said: Any = [user("list"), {"role": "assistant", "content": "one two three"}]
    async with anthropic.AsyncAnthropic(base_url=stand.url, api_key="agent") as client:
        less = await client.messages.count_tokens(model="m", messages=said[:1])
        more = await client.messages.count_tokens(model="m", messages=said)
        beta = await client.beta.messages.count_tokens(model="m", messages=said)
        with pytest.raises(anthropic.BadRequestError, match="prefilled answers are not served"):
            await client.messages.create(model="m", max_tokens=9, messages=said)
    assert less.input_tokens < more.input_tokens == beta.input_tokens


async def test_a_stop_sequence_is_named(serve: Serve) -> None:
    answer = await ask(await serve(lambda prompt, ids: "one END two"), user("count"), stop_sequences=["END"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
    assert answer["content"] == [{"type": "text", "text": "one "}]


async def test_thinking_can_be_turned_off_and_its_budget_is_named(serve: Serve) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    stand = await serve(seen)
    await ask(stand, user("hi"), thinking={"type": "disabled"})
    thinking = {"type": "enabled", "budget_tokens": 1024}
    async with stand.send("/v1/messages", body(user("hi"), thinking=thinking)) as answer:
        assert answer.headers["X-Blackforge-Ignored"] == "thinking.budget_tokens"
    assert "<think>\n\n</think>" in seen.prompts[0] and "<think>" not in seen.prompts[1]


@pytest.mark.parametrize("keep", ["all", {"type": "all"}])
async def test_an_edit_that_keeps_all_changes_nothing(serve: Serve, keep: Any) -> None:
    edit = {"type": "clear_thinking_20251015", "keep": keep}
    answer = await ask(await serve(script), user("list"), context_management={"edits": [edit]})
    assert answer["content"][0]["thinking"] == "look first"


async def test_a_compaction_is_refused_but_not_its_count(serve: Serve) -> None:
    stand = await serve(script)
    counted, plain = [
        await stand.ask("/v1/messages/count_tokens", body(user("list"), **fields))
        for fields in ({"compaction": {"type": "summarize"}}, {})
    ]
    refused = await ask(stand, user("list"), compaction={"type": "summarize"})
    assert counted == plain and refused["status"] == 400 and stand.recorded() == []


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": [user([IMAGE])]}, "messages[0].content[0]"),  # type: ignore[arg-type]
        ({"messages": [user([{"type": "tool_result", "content": [IMAGE]}])]}, "messages[0].content[0].content[0]"),  # type: ignore[arg-type]
        ({"messages": []}, "messages"),
        ({"messages": [user("x"), {"role": "assistant", "content": "so"}]}, "messages[1].role"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"context_management": {"edits": 5}}, "context_management.edits"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(serve: Serve, fields: dict[str, Any], field: str) -> None:
    stand = await serve(script)
    answer = await stand.ask("/v1/messages", {**body(user("hi")), **fields})
    assert (answer["status"], answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["message"].startswith(field) and stand.recorded() == []


async def test_an_overflow_says_prompt_is_too_long(serve: Serve) -> None:
    stand = await serve(script, context_length=200)
    answer = await ask(stand, user("word " * 300))
    assert answer["status"] == 400 and answer["error"]["message"].startswith("prompt is too long: ")
    assert answer["error"]["message"].endswith(" tokens > 192 maximum")
    counted = await stand.ask("/v1/messages/count_tokens", body(user("word " * 300)))
    assert counted["input_tokens"] > 300


async def test_an_engine_that_dies_in_mid_stream(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: Fault(text="one two three four", after=3))
    *_, last = await stand.events("/v1/messages", body(user("count"), stream=True))
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert stand.recorded()[0].finish_reason == "error"


async def test_errors_before_the_call_have_the_dialects_form(serve: Serve) -> None:
    stand = await serve(script)
    answer = await stand.ask("/v1/messages", body(user("hi")), **{"x-api-key": "bf-unknown"})
    assert (answer["status"], answer["error"]["type"]) == (401, "authentication_error")
    unknown = await stand.ask("/v1/messages/batches", {})
    assert (unknown["status"], unknown["error"]["type"]) == (404, "not_found_error")


async def test_a_silent_engine_is_bridged_by_signs_of_life(serve: Serve) -> None:
    slow = ScriptedReply("<think>\nhm\n</think>\n\nyes no", seconds_per_token=0.15)
    stand = await serve(lambda prompt, ids: slow, limits={"keepalive_seconds": 0.05})
    events = await stand.events("/v1/messages", body(user("sure?"), stream=True))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [event["type"] for event in events].count("ping") > 1
    assert {"type": "text_delta", "text": ""} in deltas
    assert "".join(delta.get("text", "") for delta in deltas) == "yes no"
