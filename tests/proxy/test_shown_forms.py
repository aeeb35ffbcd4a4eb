"""Schemas that no grammar enforces: the model reads them, samples freely, and each answer is checked and trains."""

import json
from itertools import pairwise
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from proxy.call import ANY_OBJECT, Call, Constraint
from proxy.prompt.shown_form import with_form
from tests.proxy.conftest import SHELL, Seen, Serve, Stand, shell_call, user
from tests.proxy.test_structured_output import ANSWERS, CALLS, CHAT, SAID, SCHEMA
from tests.proxy.written import ONE, WRITERS

TITLE = '{"title": "hello"}'
FORM = {"type": "json_schema", "json_schema": {"name": "t", "schema": SCHEMA}}
SHOWN = json.dumps(SCHEMA, separators=(",", ":"))


class Title(pydantic.BaseModel):
    title: str


def misfits(stand: Stand) -> list[str | None]:
    rows = stand.recorded()
    assert all(row.untrainable is None and row.shape and row.shape.constrained for row in rows)
    return [row.misfit for row in rows]


@pytest.mark.parametrize(("path", "fields", "schema"), ANSWERS)
async def test_the_model_reads_the_schema(path: str, fields: dict[str, Any], schema: Any, serve: Serve) -> None:
    seen = Seen(lambda prompt, ids: TITLE)
    stand = await serve(seen, prescribed="prefill")
    answer = await stand.ask(path, SAID[path] | fields)
    assert answer["status"] == 200 and '{\\"title\\": \\"hello\\"}' in json.dumps(answer)
    words = "one JSON object" if schema == ANY_OBJECT else json.dumps(schema, separators=(",", ":"))
    assert words in seen.prompts[0].split("<|im_start|>user")[0]
    assert stand.engine is not None and "json_schema" not in stand.engine.last_params
    assert misfits(stand) == [""]


async def test_what_does_not_fit_is_served_and_counted(serve: Serve) -> None:
    words = iter(["```json\n" + TITLE + "\n```", '{"name": "hello"}', TITLE])
    stand = await serve(lambda prompt, ids: next(words), prescribed="prefill")
    answers = [await stand.chat(user("hello"), response_format=FORM) for _ in range(3)]
    assert [answer["status"] for answer in answers] == [200] * 3
    assert answers[1]["choices"][0]["message"]["content"] == '{"name": "hello"}'
    first, second, third = misfits(stand)
    assert first and first.startswith("the answer is not JSON") and second == "the answer lacks 'title'" and third == ""
    async with stand.http.get(f"{stand.url}/metrics") as metrics:
        assert 'blackforge_unfit_answers_total{form="schema"} 2.0' in await metrics.text()


@pytest.mark.parametrize("prescribed", ["prefill", "grammar"])
async def test_beside_tools_a_call_is_as_good_as_the_form(serve: Serve, prescribed: str) -> None:
    """Whatever enforces other forms: a grammar cannot have both."""
    seen = Seen(lambda prompt, ids: TITLE if "tool_response" in prompt else shell_call("ls"))
    stand = await serve(seen, prescribed=prescribed)
    fields: dict[str, Any] = {"tools": [SHELL], "response_format": FORM}
    call = (await stand.chat(user("look"), **fields))["choices"][0]["message"]
    assert call["tool_calls"][0]["function"]["name"] == "shell"
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "a b"}
    answer = await stand.chat(user("look"), call, result, **fields)
    assert answer["choices"][0]["message"]["content"] == TITLE and SHOWN in seen.prompts[1]
    assert "When you answer without calling a tool" in seen.prompts[1] and misfits(stand) == ["", ""]
    first, second = stand.recorded()
    assert second.follows == first.id and second.prefix_length == first.prompt_length + len(first.sampled)


BOTH = [
    (path, calls | form)
    for path, calls, _ in CALLS
    for other, form, schema in ANSWERS
    if path == other and schema == SCHEMA
]


def continued(prompt: str) -> str:
    """A call, from where the proxy has begun it."""
    text = WRITERS["qwen"][1](ONE)
    given = next((size for size in range(len(text), 0, -1) if prompt.endswith(text[:size])), 0)
    return "\nhm\n</think>" if prompt.endswith("<think>") else text[given:]


@pytest.mark.parametrize(("path", "fields"), BOTH)
async def test_the_schema_is_shown_beside_a_required_call(path: str, fields: dict[str, Any], serve: Serve) -> None:
    seen = Seen(lambda prompt, ids: continued(prompt))
    stand = await serve(seen, prescribed="prefill")
    answer = await stand.ask(path, SAID[path] | fields)
    assert answer["status"] == 200 and '"shell"' in json.dumps(answer) and SHOWN in seen.prompts[0]
    assert misfits(stand) == [""] and stand.recorded()[0].given


@pytest.mark.parametrize("prescribed", ["prefill", "grammar"])
async def test_the_choice_of_calls_may_change_in_a_conversation(serve: Serve, prescribed: str) -> None:
    """OpenAI's Agents SDK requires a call until there is one, and other clients forbid calls at the end."""
    stand = await serve(
        lambda prompt, ids: TITLE if prompt.count("<tool_response>") == 2 else continued(prompt), prescribed=prescribed
    )
    history, answers = [user("look")], []
    for choice in ("required", "auto", "none"):
        answer = await stand.chat(*history, tools=[SHELL], response_format=FORM, tool_choice=choice)
        answers.append(message := answer["choices"][0]["message"])
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "a b"} for call in message.get("tool_calls", ())
        ]
        history += [message, *results]
    assert answers[2]["content"] == TITLE and [len(each.get("tool_calls", ())) for each in answers] == [1, 1, 0]
    paths = [stand.path(index) for index in range(3)]
    assert [after[: len(before)] == before for before, after in pairwise(paths)] == [True, True]


async def test_a_schema_at_the_end_only_is_a_branch_that_follows(serve: Serve) -> None:
    seen = Seen(lambda prompt, ids: TITLE if SHOWN in prompt else "I  see.")
    stand = await serve(seen, prescribed="prefill")
    said = (await stand.chat(user("hello")))["choices"][0]["message"]
    asked = [user("hello"), said, user("now as JSON")]
    form = (await stand.chat(*asked, response_format=FORM))["choices"][0]["message"]
    await stand.chat(*asked, form, user("and now?"))
    first, second, third = stand.recorded()
    assert (second.follows, third.follows) == (first.id, second.id)
    shared = first.prompt_length + len(first.sampled)
    assert second.prefix_length < first.prompt_length and third.prefix_of == first.id and third.prefix_length >= shared
    assert SHOWN in seen.prompts[1] and SHOWN not in seen.prompts[2] and TITLE in seen.prompts[2]
    assert "I  see." in seen.prompts[1] and stand.path(2)[:shared] == stand.path(0)


async def test_reasoning_comes_before_the_form(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: f"<think>\nhm\n</think>\n\n{TITLE}", prescribed="prefill")
    message = (await stand.chat(user("hello"), response_format=FORM))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", TITLE) and misfits(stand) == [""]


async def test_openais_client_parses_it(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: TITLE, prescribed="prefill")
    messages: Any = [user("hello")]
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="agent") as client:
        chat = await client.chat.completions.parse(model="m", messages=messages, response_format=Title)
        assert chat.choices[0].message.parsed == Title(title="hello")
        async with client.chat.completions.stream(model="m", messages=messages, response_format=Title) as stream:
            streamed = await stream.get_final_completion()
        assert streamed.choices[0].message.parsed == Title(title="hello")
        response = await client.responses.parse(model="m", input="hello", text_format=Title)
        assert response.output_parsed == Title(title="hello")
        tools: Any = [{**SHELL, "function": {**SHELL["function"], "strict": True}}]  # type: ignore[dict-item]
        beside = await client.chat.completions.parse(model="m", messages=messages, response_format=Title, tools=tools)
        assert beside.choices[0].message.parsed == Title(title="hello")
    assert misfits(stand) == [""] * 4


async def test_anthropics_client_parses_it(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: TITLE, prescribed="prefill")
    messages: Any = [user("hello")]
    async with anthropic.AsyncAnthropic(base_url=stand.url, api_key="agent") as client:
        whole = await client.messages.parse(model="m", max_tokens=99, messages=messages, output_format=Title)
        assert whole.parsed_output == Title(title="hello")
        async with client.messages.stream(model="m", max_tokens=99, messages=messages, output_format=Title) as stream:
            final = await stream.get_final_message()
    assert final.content[0].type == "text" and final.content[0].text == TITLE
    assert misfits(stand) == ["", ""]


def shown(*messages: dict[str, Any], system: bool = True) -> list[tuple[str, str]]:
    call = Call(model="m", constraint=Constraint("response_format", ANY_OBJECT))
    return [(message["role"], message["content"]) for message in with_form(messages, call, system)]


def test_the_place_of_the_words() -> None:
    rule, hello = "Answer with one JSON object, and write nothing before or after it.", user("hello")
    system = {"role": "system", "content": "Be kind."}
    assert shown(system, hello) == [("system", f"Be kind.\n\n{rule}"), ("user", "hello")]
    assert shown(hello, system) == [("system", rule), ("user", "hello"), ("system", "Be kind.")]
    assert shown(hello, hello, system=False) == [("user", f"{rule}\n\nhello"), ("user", "hello")]


async def test_a_refused_schema_is_still_named(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "never asked", prescribed="prefill")
    answer = await stand.ask(CHAT, SAID[CHAT] | {"response_format": {"type": "json_schema"}})
    assert answer["status"] == 400 and "response_format has no JSON schema" in answer["error"]["message"]
