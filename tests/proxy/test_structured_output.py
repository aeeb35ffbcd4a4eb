"""Answers of a prescribed form: each dialect's wish reaches the engine as a grammar, and the answer is not trained."""

import json
import math
from typing import Any

import msgspec
import pytest

from proxy.call import Call
from proxy.dialects.structured_output import call_constraint, grammar
from proxy.engine.client import grammar_params
from proxy.engine.sglang import Sglang
from proxy.parsing.formats import FORMATS, ToolSchemas
from proxy.parsing.formats.qwen import Qwen
from proxy.parsing.turn_parser import ParsedCall, TurnParser
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import SHELL, Serve, shell_call, user

SCHEMA = {"type": "object", "properties": {"title": {"type": "string", "maxLength": 20}}, "required": ["title"]}
GOOGLES = {"type": "OBJECT", "properties": {"title": {"type": "STRING", "maxLength": 20}}, "required": ["title"]}
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
GEMINI = "/v1beta/models/tiny:generateContent"
SAID: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [user("hello")]},
    MESSAGES: {"messages": [user("hello")], "max_tokens": 99},
    RESPONSES: {"input": "hello"},
    GEMINI: {"contents": [{"parts": [{"text": "hello"}]}]},
}
NAMED = {"type": "json_schema", "name": "t", "schema": SCHEMA}
JSON = "application/json"
ANSWERS: list[tuple[str, dict[str, Any], Any]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}}, SCHEMA),
    (CHAT, {"response_format": {"type": "json_object"}}, {"type": "object"}),
    (RESPONSES, {"text": {"format": NAMED}}, SCHEMA),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, SCHEMA),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, SCHEMA),
    (GEMINI, {"generationConfig": {"responseMimeType": JSON, "responseSchema": GOOGLES}}, SCHEMA),
    (GEMINI, {"generationConfig": {"responseMimeType": JSON, "responseJsonSchema": SCHEMA}}, SCHEMA),
    (GEMINI, {"generationConfig": {"responseMimeType": JSON}}, {"type": "object"}),
]
FREE = {"type": "function", "name": "shell", "parameters": PARAMETERS}
ANTHROPIC = {"name": "shell", "input_schema": PARAMETERS}
GOOGLE = [{"functionDeclarations": [{"name": "shell", "parametersJsonSchema": PARAMETERS}]}]
CALLS: list[tuple[str, dict[str, Any], bool]] = [
    (CHAT, {"tools": [SHELL], "tool_choice": "required"}, False),
    (CHAT, {"tools": [SHELL], "tool_choice": {"type": "function", "function": {"name": "shell"}}}, True),
    (RESPONSES, {"tools": [FREE], "tool_choice": "required"}, False),
    (RESPONSES, {"tools": [FREE], "tool_choice": {"type": "function", "name": "shell"}}, True),
    (MESSAGES, {"tools": [ANTHROPIC], "tool_choice": {"type": "any"}}, False),
    (MESSAGES, {"tools": [ANTHROPIC], "tool_choice": {"type": "tool", "name": "shell"}}, True),
    (GEMINI, {"tools": GOOGLE, "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, False),
]


@pytest.mark.parametrize(("path", "fields", "schema"), ANSWERS)
async def test_a_schema_reaches_the_engine(path: str, fields: dict[str, Any], schema: Any, serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: '{"title": "hello"}', prescribed="grammar")
    answer = await stand.ask(path, SAID[path] | fields)
    assert answer["status"] == 200 and '{\\"title\\": \\"hello\\"}' in json.dumps(answer)
    assert stand.engine is not None
    assert msgspec.json.decode(stand.engine.last_params["json_schema"]) == schema
    [row] = stand.recorded()
    assert str(row.untrainable) == "constrained" and row.shape and row.shape.constrained


@pytest.mark.parametrize(("path", "fields", "once"), CALLS)
async def test_a_call_is_forced(path: str, fields: dict[str, Any], once: bool, serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: shell_call("ls"), prescribed="grammar")
    answer = await stand.ask(path, SAID[path] | fields)
    assert answer["status"] == 200 and '"shell"' in json.dumps(answer)
    assert stand.engine is not None
    rule = msgspec.json.decode(stand.engine.last_params["structural_tag"])["format"]
    assert (rule["at_least_one"], rule["stop_after_first"]) == (True, once)
    [tag] = rule["tags"]
    assert tag["content"]["json_schema"] == PARAMETERS
    read = Qwen().read(f'{tag["begin"]}{{"command":"ls"}}{tag["end"]}', ToolSchemas([SHELL]))
    assert read and read.call and (read.call.name, read.call.arguments) == ("shell", '{"command": "ls"}')
    [row] = stand.recorded()
    assert str(row.untrainable) == "constrained" and row.finish_reason == "tool_calls"


async def test_a_form_that_is_not_enforced_is_sampled_freely_and_trained(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "no JSON", prescribed="prefill")
    await stand.chat(user("hello"), response_format={"type": "json_object"})
    assert stand.engine is not None and "json_schema" not in stand.engine.last_params
    [row] = stand.recorded()
    assert row.untrainable is None and row.shape and row.shape.constrained


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        (CHAT, {"response_format": {"type": "xml"}}, "response_format is of type 'xml'"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format has no JSON schema"),
        (CHAT, {"tool_choice": "required"}, "the request has no tools"),
        (CHAT, {"tools": [SHELL], "tool_choice": {"type": "allowed_tools"}}, "or one named function"),
        (RESPONSES, {"tools": [FREE], "tool_choice": {"type": "function", "name": "sh"}}, "tool_choice names 'sh'"),
        (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format is of type 'grammar'"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "the request has no tools"),
        (MESSAGES, {"output_format": {"type": "regex"}}, "output_config.format is of type 'regex'"),
        (GEMINI, {"generationConfig": {"responseMimeType": "text/x.enum"}}, "'text/x.enum'"),
        (GEMINI, {"generationConfig": {"responseSchema": GOOGLES}}, "needs responseMimeType 'application/json'"),
    ],
)
async def test_what_cannot_be_prescribed_is_refused(
    path: str, fields: dict[str, Any], sentence: str, serve: Serve
) -> None:
    stand = await serve(lambda prompt, ids: "never asked")
    answer = await stand.ask(path, SAID[path] | fields)
    assert answer["status"] == 400 and sentence in answer["error"]["message"]
    assert stand.recorded() == []


@pytest.mark.parametrize("name", ["qwen", "llama3"])
def test_forced_calls_are_calls_of_the_format(name: str) -> None:
    form, tools = FORMATS[name](), (SHELL, {"type": "function", "function": {"name": "stop"}})
    asked = Call(model="m", tools=tools, constraint=call_constraint("tool_choice", [], tools))
    rules = grammar(asked, form)
    assert rules is not None
    rule = msgspec.json.decode(grammar_params(rules)["structural_tag"])["format"]
    bodies = ['{"command":"ls"}', "{}"]
    text = rule["separator"].join(f"{t['begin']}{b}{t['end']}" for t, b in zip(rule["tags"], bodies, strict=True))
    parser = TurnParser(form, tools=ToolSchemas(tools), reasoning=False)
    parsed = [piece for piece in [*parser.feed(text), *parser.finish()] if isinstance(piece, ParsedCall)]
    assert [(call.name, call.arguments) for call in parsed] == [("shell", '{"command": "ls"}'), ("stop", "{}")]


async def test_a_format_whose_calls_are_no_json_cannot_be_forced(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "never asked", tool_format="glm45", prescribed="grammar")
    answer = await stand.chat(user("hello"), tools=[SHELL], tool_choice="required")
    assert answer["status"] == 400 and "tool_choice asks for a call" in answer["error"]["message"]


async def test_a_prescribed_answer_is_no_reasoning_where_the_template_opens_one(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: '{"title": "x"}', prescribed="grammar")
    options = {"enable_thinking": True}
    form = {"type": "json_object"}
    answer = await stand.chat(user("hello"), response_format=form, chat_template_kwargs=options)
    assert answer["choices"][0]["message"]["content"] == '{"title": "x"}'


async def test_the_real_engine_keeps_to_schema_and_call(sglang_engine: Sglang, serve: Serve) -> None:
    stand = await serve(url=sglang_engine.url, prescribed="grammar")
    properties = {"done": {"type": "boolean"}}
    asked = {"type": "object", "properties": properties, "required": ["done"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "t", "schema": asked}}
    answer = await stand.chat(user("hello"), response_format=form)
    assert list(json.loads(answer["choices"][0]["message"]["content"])) == ["done"]
    tool = {"type": "function", "function": {"name": "finish", "parameters": asked}}
    answer = await stand.chat(
        user("hello"), tools=[tool], tool_choice={"type": "function", "function": tool["function"]}
    )
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "finish" and list(json.loads(call["function"]["arguments"])) == ["done"]
    rows = stand.recorded()
    assert [str(row.untrainable) for row in rows] == ["constrained"] * 2
    assert all(len(row.logprobs) == len(row.sampled) for row in rows)
    form["json_schema"] = {"name": "t", "schema": {"type": "nothing"}}
    assert (await stand.chat(user("hello"), response_format=form))["status"] == 400


async def test_logprobs_under_a_grammar_are_those_of_the_allowed_tokens(
    sglang_engine: Sglang, serve: Serve, template: ChatTemplate
) -> None:
    """The engine's own, and those of the same path without a grammar, normalised over what the grammar allowed."""
    http = (await serve(url=sglang_engine.url)).http
    prompt, words = template.encode("<|im_start|>assistant\n"), template.tokenizer.get_vocab_size()

    async def generate(ids: list[int], **fields: Any) -> dict[str, Any]:
        params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, **fields.pop("params")}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "top_logprobs_num": words}
        async with http.post(f"{sglang_engine.url}/generate", json=body | fields) as answer:
            generated: dict[str, Any] = await answer.json()
            return generated

    schema = json.dumps({**SCHEMA, "additionalProperties": False})
    forced = await generate(prompt, params={"max_new_tokens": 12, "json_schema": schema})
    ids, meta = forced["output_ids"], forced["meta_info"]
    free = await generate(prompt + ids, params={"max_new_tokens": 1}, logprob_start_len=len(prompt) - 1)
    places = free["meta_info"]["input_top_logprobs"][-len(ids) :]
    for (logprob, id, _), tops, place in zip(
        meta["output_token_logprobs"], meta["output_top_logprobs"], places, strict=True
    ):
        unmasked = {token: value for value, token, _ in place}
        allowed = [token for value, token, _ in tops if value is not None and value > -1e30]
        assert len(allowed) < words and logprob > unmasked[id]
        rest = math.log(sum(math.exp(unmasked[token]) for token in allowed))
        assert math.isclose(logprob, unmasked[id] - rest, abs_tol=1e-4)
