"""OpenAI Responses with a scripted engine: its events, its tools, and turns that continue with recorded ids."""

from typing import Any

import msgspec
import openai
import pytest

from proxy.engine.scripted import Fault, ScriptedReply
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import SHELL, Seen, Serve, Stand, shell_call, user

TOOL: dict[str, Any] = {"type": "function", **SHELL["function"], "strict": False}  # type: ignore[dict-item]
CODEX: dict[str, Any] = {
    "tools": [
        TOOL,
        {"type": "namespace", "name": "crew", "tools": [{**TOOL, "name": "spawn"}]},
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
        },
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread",
    "client_metadata": {"window": "thread:0"},
}
"""What codex sends with every request."""
THOUGHT = "<think>\nlook first\n</think>\n\nI look.\n" + shell_call("ls") + "\n" + shell_call("pwd")
QUESTION = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]}


async def ask(stand: Stand, *items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return await stand.ask("/v1/responses", {"model": "m", "input": list(items), **CODEX, **fields})


def script(prompt: str, ids: Any) -> str:
    return "done" if "<tool_response>" in prompt else THOUGHT


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{msgspec.json.encode({'name': name, 'arguments': arguments}).decode()}\n</tool_call>"


def outputs(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls = [item for item in items if "call_id" in item]
    return [{"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "file"} for call in calls]


def without_reasoning_text(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as codex sends it back: reasoning has only its encrypted content."""
    return [{name: v for name, v in item.items() if item["type"] != "reasoning" or name != "content"} for item in items]


async def test_a_whole_answer_has_an_item_for_each_part(serve: Serve) -> None:
    answer = await ask(await serve(script), QUESTION)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert answer["output"][0]["content"] == [{"type": "reasoning_text", "text": "look first"}]
    assert msgspec.json.decode(answer["output"][3]["arguments"]) == {"command": "pwd"}


@pytest.mark.parametrize("echo", [list, without_reasoning_text])
async def test_the_second_turn_continues_with_recorded_ids(serve: Serve, echo: Any) -> None:
    stand = await serve(script)
    items = (await ask(stand, QUESTION))["output"]
    await ask(stand, QUESTION, *echo(items), *outputs(items))
    first, second = stand.recorded()
    assert second.follows == first.id and stand.path(1)[: len(stand.path(0))] == stand.path(0)


async def test_a_text_behind_a_text_is_another_turn(serve: Serve) -> None:
    """codex keeps the text of a reply that broke off, and sends it again as part of the history."""
    stand = await serve(script)
    kept = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I begin."}]}
    output = (await ask(stand, QUESTION, kept))["output"]
    await ask(stand, QUESTION, kept, *output, *outputs(output))
    assert stand.recorded()[1].follows == stand.recorded()[0].id
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)


@pytest.mark.parametrize(
    ("turn", "item"),
    [
        (called("crew__spawn", command="a"), {"type": "function_call", "name": "spawn", "namespace": "crew"}),
        (called("patch", input="+ a"), {"type": "custom_tool_call", "name": "patch", "input": "+ a"}),
        (called("patch", file="a"), {"type": "function_call", "name": "patch", "arguments": '{"file": "a"}'}),
        (called("unheard", x=1), {"type": "function_call", "name": "unheard", "arguments": '{"x": 1}'}),
    ],
)
async def test_calls_come_and_go_under_the_names_of_the_client(serve: Serve, turn: str, item: dict[str, Any]) -> None:
    stand = await serve(lambda prompt, ids: "done" if "<tool_response>" in prompt else turn)
    items = (await ask(stand, QUESTION))["output"]
    assert items[0] | item == items[0]
    await ask(stand, QUESTION, *items, *outputs(items))
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)


async def test_the_model_reads_namespaces_and_grammars(serve: Serve) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    await ask(await serve(seen), QUESTION, instructions="be brief")
    assert '"name": "crew__spawn"' in seen.prompts[0] and "start: LINE" in seen.prompts[0]
    assert "be brief" in seen.prompts[0] and "web_search" not in seen.prompts[0]


@pytest.mark.parametrize(
    ("turn", "end", "expected"),
    [
        ("<think>\nlook first\n</think>\n\nI look.", True, "<think>\nlook first\n</think>"),
        ("<think>\nlook first", False, "<think>\nlook first"),
        ("I look.", True, ""),
    ],
)
async def test_the_tokens_of_reasoning_are_counted(
    serve: Serve, template: ChatTemplate, turn: str, end: bool, expected: str
) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply(turn, end=end))
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="agent", max_retries=0) as client:
        usage = (await client.responses.create(model="m", input="list")).usage
    assert usage is not None and usage.output_tokens_details.reasoning_tokens == len(template.encode(expected))
    assert usage.to_dict()["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


async def test_tokens_of_reasoning_whose_end_was_spelled_are_not_guessed(serve: Serve, template: ChatTemplate) -> None:
    spelled = [token for text in ("<think>", "hm", "</thi", "nk>", "yes") for token in template.encode(text)]
    stand = await serve(lambda prompt, ids: ScriptedReply("", ids=tuple(spelled)))
    answer = await ask(stand, QUESTION)
    assert answer["output"][0]["type"] == "reasoning" and answer["output"][1]["content"][0]["text"] == "yes"
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": None}


async def test_the_events_of_a_stream(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply("yes\n" + shell_call("ls"), tokens_per_event=100))
    events = await stand.events("/v1/responses", {"input": "list", "stream": True, **CODEX})
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    assert done[1]["call_id"] == stand.recorded()[0].reply["tool_calls"][0]["id"]


async def test_openais_client_reads_both_alike(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply(THOUGHT, tokens_per_event=3))
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="agent") as client:
        fields: Any = {"model": "m", "input": "list", "tools": [TOOL]}
        whole = await client.responses.create(**fields)
        async with client.responses.stream(**fields) as stream:
            streamed = await stream.get_final_response()
    kinds = [[(item.type, item.model_dump(exclude={"id", "call_id", "parsed_arguments"})) for item in answer.output]
             for answer in (whole, streamed)]  # fmt: skip
    assert len(kinds[0]) == 4 and [kind for kind, _ in kinds[0]] == [kind for kind, _ in kinds[1]]
    assert whole.output_text == streamed.output_text == "I look."
    assert whole.usage == streamed.usage and len(stand.recorded()) == 2


async def test_a_cut_answer_is_incomplete(serve: Serve) -> None:
    answer = await ask(await serve(lambda prompt, ids: "a b c d e f"), QUESTION, max_output_tokens=3)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_what_changes_nothing_is_named(serve: Serve) -> None:
    stand = await serve(script)
    async with stand.send("/v1/responses", {"input": "list", **CODEX}) as answer:
        ignored = answer.headers["X-Blackforge-Ignored"].split(", ")
    assert {"tools.web_search", "reasoning.summary", "prompt_cache_key", "tools[].strict"} <= set(ignored)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "output": [{"type": "input_file"}]}]}, "input[0].output[0]"),
        ({"tools": [{"type": "file_search"}]}, "tools[0]"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0]"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(serve: Serve, fields: dict[str, Any], param: str) -> None:
    stand = await serve(script)
    answer = await ask(stand, **{"input": "hi", **fields})
    assert (answer["status"], answer["error"]["param"]) == (400, param)
    assert answer["error"]["message"].startswith(param) and stand.recorded() == []


async def test_an_overflow_has_the_code_that_clients_know(serve: Serve) -> None:
    answer = await ask(await serve(script, context_length=200), user("word " * 300))
    assert (answer["status"], answer["error"]["code"]) == (400, "context_length_exceeded")
    assert answer["error"]["param"] == "input"


async def test_an_engine_that_dies_in_mid_stream(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: Fault(text="one two three four", after=3))
    *_, last = await stand.events("/v1/responses", {"input": "count", "stream": True})
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "engine_died")
    assert stand.recorded()[0].finish_reason == "error"


async def test_a_silent_engine_is_bridged_by_events(serve: Serve) -> None:
    stand = await serve(
        lambda prompt, ids: ScriptedReply("yes no", seconds_per_token=0.15), limits={"keepalive_seconds": 0.05}
    )
    events = await stand.events("/v1/responses", {"input": "sure?", "stream": True})
    assert [event["type"] for event in events].count("response.in_progress") > 2
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_events_are_numbered_in_the_order_in_which_they_leave(serve: Serve) -> None:
    script = ScriptedReply("yes no maybe " * 40, seconds_per_token=0.002)
    stand = await serve(lambda prompt, ids: script, limits={"keepalive_seconds": 1e-6})
    for _ in range(5):
        events = await stand.events("/v1/responses", {"input": "sure?", "stream": True})
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
