"""Gemini with a scripted engine: its parts, its errors, and turns that continue with recorded ids."""

from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from proxy.dialects import gemini
from proxy.dialects.base import sealed
from proxy.engine.scripted import Fault, ScriptedReply
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import SHELL, Seen, Serve, Stand, shell_call, user
from tests.proxy.dialect_clients import events

PATH = "/v1beta/models/tiny:generateContent"
STREAM = "/v1beta/models/tiny:streamGenerateContent?alt=sse"
SCHEMA = {"type": "OBJECT", "properties": {"command": {"type": "STRING"}}, "required": ["command"]}
TOOLS = [{"functionDeclarations": [{"name": "shell", "description": "run a command", "parameters": SCHEMA}]}]
THOUGHT = "<think>\nlook first\n</think>\n\nI look.\n" + shell_call("ls") + "\n" + shell_call("pwd")
SHOWN = {"thinkingConfig": {"includeThoughts": True}}


def content(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "parts": [{"text": text}]}


def body(*contents: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"contents": contents, "tools": TOOLS, **fields}


async def ask(stand: Stand, *contents: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The parts of the answer."""
    answer = await stand.ask(PATH, body(*contents, **fields), **{"x-goog-api-key": "agent"})
    parts: list[dict[str, Any]] = answer["candidates"][0]["content"]["parts"]
    return parts


def script(prompt: str, ids: Any) -> str:
    return "done" if "<tool_response>" in prompt else THOUGHT


def responses(parts: list[dict[str, Any]]) -> dict[str, Any]:
    calls = [part["functionCall"] for part in parts if "functionCall" in part]
    results = [{"functionResponse": {**call, "response": {"output": "file"}}} for call in calls]
    return {"role": "user", "parts": [{"functionResponse": {**f["functionResponse"]}} for f in results]}


async def test_thoughts_are_shown_where_they_are_asked_for(serve: Serve) -> None:
    stand = await serve(script)
    hidden = await ask(stand, content("list"))
    shown = await ask(stand, content("list"), generationConfig=SHOWN)
    assert [sorted(part) for part in hidden] == [["text"], ["functionCall", "thoughtSignature"], ["functionCall"]]
    assert shown[0] == {"text": "look first", "thought": True} and len(shown) == 4
    assert shown[2]["functionCall"]["args"] == {"command": "ls"}


@pytest.mark.parametrize("config", [{}, SHOWN])
async def test_the_second_turn_continues_with_recorded_ids(serve: Serve, config: dict[str, Any]) -> None:
    stand = await serve(script)
    parts = await ask(stand, content("list"), generationConfig=config)
    await ask(stand, content("list"), {"role": "model", "parts": parts}, responses(parts))
    first, second = stand.recorded()
    assert second.follows == first.id and stand.path(1)[: len(stand.path(0))] == stand.path(0)


@pytest.mark.parametrize("config", [{}, SHOWN])
async def test_events_that_come_back_one_by_one_are_one_turn(serve: Serve, config: dict[str, Any]) -> None:
    """Google's clients send each event of a streamed turn back as a content of its own."""
    stand = await serve(script)
    sent = await stand.events(STREAM, body(content("list"), generationConfig=config))
    contents = [event["candidates"][0]["content"] for event in sent]
    parts = [part for each in contents for part in each["parts"]]
    await ask(stand, content("list"), *contents, responses(parts), generationConfig=config)
    first, second = stand.recorded()
    assert len(contents) > 3 and second.follows == first.id
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)


@pytest.mark.parametrize("role", ["user", "function", "tool"])
async def test_results_come_in_each_role_that_clients_give_them(serve: Serve, role: str) -> None:
    seen = Seen(script)
    stand = await serve(seen)
    parts = await ask(stand, content("list"))
    await ask(stand, content("list"), {"role": "model", "parts": parts}, responses(parts) | {"role": role})
    assert seen.prompts[1].count("<tool_response>\nfile\n</tool_response>") == 2


async def test_the_prompt_is_the_models_template(serve: Serve, template: ChatTemplate) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    turn = {"role": "model", "parts": [{"functionCall": {"name": "shell", "args": {"command": "ls"}}}]}
    result = {"functionResponse": {"name": "shell", "response": {"output": "file"}}}
    failed = {"functionResponse": {"name": "shell", "response": {"error": "no"}}}
    history = [content("list"), turn, {"parts": [result, failed]}]
    await ask(await serve(seen), *history, systemInstruction={"parts": [{"text": "be brief"}]})
    call = {"function": {"name": "shell", "arguments": {"command": "ls"}}}
    expected = [{"role": "system", "content": "be brief"}, user("list"), {"role": "assistant", "tool_calls": [call]}]
    expected += [{"role": "tool", "content": "file"}, {"role": "tool", "content": '{"error":"no"}'}]
    assert seen.prompts == [template.render(expected, [SHELL])]


def test_reasoning_comes_back_in_either_alphabet_of_base64() -> None:
    """Google's Python client writes signatures anew, in the one for URLs."""
    signed = sealed("why? ~~~ >>>")
    assert "/" in signed and "+" in signed
    for signature in (signed, signed.translate(str.maketrans("+/", "-_"))):
        turn = {"role": "model", "parts": [{"text": "I see.", "thoughtSignature": signature}]}
        call = gemini.read(msgspec.json.encode(body(content("hi"), turn, content("and?"))), PATH)
        assert call.messages[1]["reasoning_content"] == "why? ~~~ >>>" and call.ignored == ()


async def test_the_events_of_a_stream(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply(THOUGHT, tokens_per_event=2))
    sent = await stand.events(STREAM, body(content("list"), generationConfig=SHOWN))
    parts = [part for event in sent for part in event["candidates"][0]["content"]["parts"]]
    assert "".join(part["text"] for part in parts if part.get("thought")) == "look first"
    assert "".join(part.get("text", "") for part in parts if not part.get("thought")) == "I look."
    assert [part["functionCall"]["args"]["command"] for part in parts if "functionCall" in part] == ["ls", "pwd"]
    assert sent[-1]["candidates"][0]["finishReason"] == "STOP" and "finishReason" not in sent[-2]["candidates"][0]
    assert sent[-1]["usageMetadata"]["candidatesTokenCount"] == len(stand.recorded()[0].sampled)


async def test_a_silent_stream_is_never_commented(serve: Serve) -> None:
    stand = await serve(
        lambda prompt, ids: ScriptedReply("yes no", seconds_per_token=0.15), limits={"keepalive_seconds": 0.05}
    )
    async with stand.send(STREAM, body(content("sure?"))) as answer:
        text = await answer.text()
    assert all(line.startswith("data: {") for line in text.splitlines() if line)


async def test_keys_come_in_a_header_or_in_the_query(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    for path, headers in ((PATH, {"x-goog-api-key": "one"}), (f"{PATH}?key=two", {"x-other": ""})):
        assert (await stand.ask(path, body(content("hi")), **headers))["status"] == 200
    assert len(stand.recorded("one")) == len(stand.recorded("two")) == 1


async def test_a_cut_answer_and_a_count(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "a b c d e f")
    answer = await stand.ask(PATH, body(content("letters"), generationConfig={"maxOutputTokens": 3}))
    assert answer["candidates"][0]["finishReason"] == "MAX_TOKENS" and answer["modelVersion"] == "tiny"
    counted = await stand.ask("/v1beta/models/tiny:countTokens", body(content("letters")))
    assert counted["totalTokens"] == answer["usageMetadata"]["promptTokenCount"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"contents": []}, "contents"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": ""}}]}]}, "contents[0].parts[0]"),
        ({"contents": [content("x", role="robot")]}, "contents[0].role"),
        ({"contents": [content("x"), content("a", "model"), {"role": "model", "parts": [{}]}]}, "contents[2].parts[0]"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0]"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOMETIMES"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseSchema": SCHEMA}}, "generationConfig.responseSchema"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"contents": 1}, "the body is not a generateContent request"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(serve: Serve, fields: dict[str, Any], field: str) -> None:
    stand = await serve(script)
    answer = await stand.ask(PATH, {**body(content("hi")), **fields})
    assert (answer["status"], answer["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert answer["error"]["message"].startswith(field) and stand.recorded() == []


async def test_a_stream_must_be_of_events(serve: Serve) -> None:
    answer = await (await serve(script)).ask(STREAM.removesuffix("?alt=sse"), body(content("hi")))
    assert answer["status"] == 400 and answer["error"]["message"].startswith("alt is not 'sse'")


async def test_an_overflow_in_googles_words(serve: Serve) -> None:
    answer = await (await serve(script, context_length=200)).ask(PATH, body(content("word " * 300)))
    assert answer["error"]["code"] == 400 and "exceeds the maximum number of tokens" in answer["error"]["message"]


async def test_a_stream_that_fails_breaks_off_behind_its_error(serve: Serve) -> None:
    """Some of Google's clients take the event of an error for an answer without candidates."""
    stand = await serve(lambda prompt, ids: Fault(text="one two three four", after=3))
    got = bytearray()
    async with stand.send(STREAM, body(content("count"))) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            async for chunk in answer.content.iter_any():
                got += chunk
    last = events(bytes(got))[-1]
    assert last["error"]["code"] == 502 and stand.recorded()[0].finish_reason == "error"
    async with stand.http.get(f"{stand.url}/metrics") as metrics:
        assert 'failures_total{kind="engine_died"} 1.0\n' in await metrics.text()


async def test_keywords_of_schemas_change_and_values_do_not(serve: Serve) -> None:
    values = {"default": {"max_items": 3}, "example": {"type": "A"}, "enum": [{"min_items": 1}], "const": {"any_of": 1}}
    named = {"default": {"type": "STRING"}, "max_items": {"type": "ARRAY", "max_items": 3, **values}}
    schema = {"type": "OBJECT", "properties": named, "$defs": {"any_of": {"any_of": [{"type": "STRING"}]}}}
    seen = Seen(script)
    tools = [{"functionDeclarations": [{"name": "shell", "parameters": schema}]}]
    await (await serve(seen)).ask(PATH, {**body(content("hi")), "tools": tools})
    [shown] = [line for line in seen.prompts[0].splitlines() if line.startswith('{"type": "function"')]
    assert msgspec.json.decode(shown)["function"]["parameters"] == {
        "type": "object",
        "properties": {"default": {"type": "string"}, "max_items": {"type": "array", "maxItems": 3, **values}},
        "$defs": {"any_of": {"anyOf": [{"type": "string"}]}},
    }


MODEL = {"inputTokenLimit": 40960, "outputTokenLimit": 99}


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1beta/models/org/tiny:8b", {}),
        ("/v1beta/models/org%2Ftiny:8b", {}),
        ("/models/org/tiny:8b?key=agent", {}),
        ("/v1/models/org/tiny:8b", {"x-goog-api-key": "agent"}),
    ],
)
async def test_a_model_is_described_under_any_name(serve: Serve, path: str, headers: dict[str, str]) -> None:
    """LlamaIndex and google-genai's `models.get` ask for it before the first call."""
    stand = await serve(script, max_new_tokens=99)
    async with stand.http.get(f"{stand.url}{path}", headers=headers) as answer:
        described = await answer.json()
    assert described | MODEL == described and described["name"] == "models/org/tiny:8b"
    assert "generateContent" in described["supportedGenerationMethods"]


async def test_openais_client_retrieves_a_model(serve: Serve) -> None:
    stand = await serve(script)
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="agent", max_retries=0) as client:
        assert (await client.models.retrieve("org/tiny")).id == "org/tiny"
