"""Logprobs for clients that ask for them: the recorded ones, of the tokens that the answer's text was sampled as."""

import asyncio
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import openai
import pytest

from proxy.engine.scripted import ScriptedReply
from proxy.engine.sglang import Sglang
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import SHELL, Serve, Stand, shell_call, user

CHAT, RESPONSES, TEXT = "/v1/chat/completions", "/v1/responses", "/v1/completions"
GEMINI = "/v1beta/models/tiny:generateContent"
SENT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [user("hello")], "max_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 3},
    RESPONSES: {
        "input": "hello",
        "max_output_tokens": 20,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
    },
    TEXT: {"prompt": "hello", "max_tokens": 20, "temperature": 0, "logprobs": 3},
    GEMINI: {
        "contents": [{"parts": [{"text": "hello"}]}],
        "generationConfig": {"maxOutputTokens": 20, "temperature": 0, "responseLogprobs": True, "logprobs": 3},
    },
}
Token = tuple[str, float, list[float]]
"""A token's text, its logprob and those of the likeliest tokens."""


async def asked(stand: Stand, path: str, stream: bool) -> tuple[str, list[Token]]:
    """The answer's text, and its tokens."""
    body = SENT[path]
    if path == GEMINI and stream:
        answers = await stand.events("/v1beta/models/tiny:streamGenerateContent?alt=sse", body)
    elif stream:
        answers = await stand.events(path, {**body, "stream": True})
    else:
        answers = [await stand.ask(path, body)]
    read = {CHAT: chat_tokens, RESPONSES: response_tokens, TEXT: text_tokens, GEMINI: gemini_tokens}[path]
    pieces = list(chain.from_iterable(map(read, answers)))
    return "".join(text for text, _ in pieces), [token for _, tokens in pieces for token in tokens]


Pieces = Iterator[tuple[str, list[Token]]]


def openai_tokens(entries: list[dict[str, Any]]) -> list[Token]:
    return [(e["token"], e["logprob"], [other["logprob"] for other in e["top_logprobs"]]) for e in entries]


def chat_tokens(answer: dict[str, Any]) -> Pieces:
    for choice in answer["choices"]:
        part = choice.get("message") or choice["delta"]
        yield part.get("content") or "", openai_tokens((choice["logprobs"] or {"content": []})["content"])


def response_tokens(answer: dict[str, Any]) -> Pieces:
    if answer.get("type") == "response.output_text.delta":
        yield answer["delta"], openai_tokens(answer["logprobs"])
    for item in answer.get("output", ()):
        for part in item["content"] if item["type"] == "message" else ():
            yield part["text"], openai_tokens(part["logprobs"])


def text_tokens(answer: dict[str, Any]) -> Pieces:
    for choice in answer["choices"]:
        logprobs = choice["logprobs"] or {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        tops = [sorted(top.values(), reverse=True) for top in logprobs["top_logprobs"]]
        yield choice["text"], list(zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True))


def gemini_tokens(answer: dict[str, Any]) -> Pieces:
    for candidate in answer["candidates"]:
        result = candidate.get("logprobsResult", {"chosenCandidates": [], "topCandidates": []})
        tops = [[other["logProbability"] for other in top["candidates"]] for top in result["topCandidates"]]
        chosen = [(token["token"], token["logProbability"]) for token in result["chosenCandidates"]]
        text = "".join(part.get("text", "") for part in candidate["content"]["parts"])
        yield text, [(*token, top) for token, top in zip(chosen, tops, strict=True)]


async def test_they_are_those_of_the_row(serve: Serve, sglang_engine: Sglang, template: ChatTemplate) -> None:
    """Real SGLang, whose most likely tokens are sampled, so that each first alternative is the token itself."""
    stand = await serve(url=sglang_engine.url)
    for path in SENT:
        for stream in (False, True):
            text, tokens = await asked(stand, path, stream)
            row = stand.recorded()[-1]
            ended = row.sampled[-1] in template.ends
            assert [logprob for _, logprob, _ in tokens] == list(row.logprobs)[: len(row.sampled) - ended]
            assert text and len(tokens) > 5
            for _, logprob, tops in tokens:
                assert len(tops) == 3 and tops == sorted(tops, reverse=True)
                assert math.isclose(tops[0], logprob, abs_tol=1e-6) and tops[0] > tops[1]


WORDS = "<think>\nhm 🙂\n</think>\n\nI see 🙂 it.\n" + shell_call("ls") + "STOP later"


@pytest.mark.parametrize("tokens_per_event", [1, 7])
async def test_the_tokens_are_those_of_the_text_alone(serve: Serve, tokens_per_event: int) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply(WORDS, tokens_per_event=tokens_per_event))
    fields: dict[str, Any] = {"logprobs": True, "tools": [SHELL], "stop": "STOP"}
    choice = (await stand.chat(user("list"), **fields))["choices"][0]
    assert choice["message"]["content"] == "I see 🙂 it." and choice["message"]["tool_calls"]
    entries = choice["logprobs"]["content"]
    assert bytes(chain.from_iterable(entry["bytes"] for entry in entries)).decode() == "I see 🙂 it.\n"
    assert len(entries) > 5 and all(entry["top_logprobs"] == [] for entry in entries)
    streamed = [e["choices"][0] for e in (await stand.stream(user("list"), **fields))[:-1]]
    pieces = [choice for choice in streamed if choice["logprobs"]]
    assert [entry for piece in pieces for entry in piece["logprobs"]["content"]] == entries
    assert all(piece["delta"]["content"] for piece in pieces)


async def test_an_answer_without_text_has_none(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: shell_call("ls"))
    choice = (await stand.chat(user("list"), logprobs=True, tools=[SHELL]))["choices"][0]
    assert choice["logprobs"] == {"content": [], "refusal": None}
    assert (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["logprobs"] is None


async def test_each_of_several_answers_has_its_own(serve: Serve) -> None:
    words = iter(["one two", "three"])
    stand = await serve(lambda prompt, ids: next(words))
    choices = (await stand.chat(user("count"), logprobs=True, n=2))["choices"]
    for choice in choices:
        tokens = "".join(entry["token"] for entry in choice["logprobs"]["content"])
        assert tokens == choice["message"]["content"]
    assert {choice["message"]["content"] for choice in choices} == {"one two", "three"}


async def test_openais_client_reads_them(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "one two three")
    async with openai.AsyncOpenAI(base_url=f"{stand.url}/v1", api_key="agent") as client:
        messages: Any = [user("count")]
        async with client.chat.completions.stream(
            model="m", messages=messages, logprobs=True, top_logprobs=2
        ) as stream:
            events = [event async for event in stream]
            chat = (await stream.get_final_completion()).choices[0].logprobs
        seen = [token for event in events if event.type == "logprobs.content.delta" for token in event.content]
        assert chat and chat.content and [t.token for t in chat.content] == [t.token for t in seen]
        assert "".join(t.token for t in seen) == "one two three"
        assert [(top.token, top.logprob) for top in chat.content[0].top_logprobs] == [(chat.content[0].token, 0.0)]
        include: Any = ["message.output_text.logprobs"]
        async with client.responses.stream(model="m", input="count", include=include, top_logprobs=1) as answer:
            deltas = [event async for event in answer if event.type == "response.output_text.delta"]
            final = await answer.get_final_response()
        parts = [token for delta in deltas for token in delta.logprobs]
        item: Any = final.output[0]
        [part] = item.content
        assert [t.token for t in part.logprobs] == [t.token for t in parts] and part.logprobs[0].top_logprobs
        text = (await client.completions.create(model="m", prompt="count", max_tokens=50, logprobs=1)).choices[0]
        assert text.logprobs and text.logprobs.tokens and "".join(text.logprobs.tokens) == "one two three"
        offsets = text.logprobs.text_offset or []
        assert all(text.text[at:].startswith(each) for at, each in zip(offsets, text.logprobs.tokens, strict=True))
        assert offsets[0] == 0 and offsets == sorted(set(offsets)) and len(text.logprobs.top_logprobs or ()) > 2


@pytest.mark.parametrize(
    ("path", "fields", "sentence"),
    [
        (CHAT, {"top_logprobs": 2}, "top_logprobs needs logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21; ask for 0 to 20 alternatives"),
        (TEXT, {"logprobs": 6}, "logprobs is 6; ask for 0 to 5"),
        (RESPONSES, {"top_logprobs": 1, "include": []}, "top_logprobs needs include"),
        (GEMINI, {"generationConfig": {"logprobs": 1}}, "generationConfig.logprobs needs"),
    ],
)
async def test_what_is_not_served_is_refused(path: str, fields: dict[str, Any], sentence: str, serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "never asked")
    body = {name: value for name, value in SENT[path].items() if "logprobs" not in name}
    answer = await stand.ask(path, body | fields)
    assert answer["status"] == 400 and sentence in answer["error"]["message"]


async def test_a_repeat_gets_them_if_it_asks(serve: Serve) -> None:
    """The answer to a client that has gone is for the repeat of its request, which asks for logprobs as it did."""
    stand = await serve(lambda prompt, ids: ScriptedReply("one two three", seconds_per_token=0.3))
    assert stand.engine is not None
    steps: tuple[tuple[dict[str, Any], int, int], ...] = (({}, 1, 2), ({"logprobs": True}, 3, 3))
    for fields, calls_before, calls in steps:
        left = asyncio.create_task(stand.chat(user("count"), **fields))
        async with asyncio.timeout(60):
            while stand.engine.calls < calls_before:
                await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait([left])
        choice = (await stand.chat(user("count"), logprobs=True))["choices"][0]
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "one two three"
        assert stand.engine.calls == calls


async def test_a_token_that_the_proxy_wrote_has_none(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "no call")
    fields: dict[str, Any] = {"tools": [SHELL], "tool_choice": "required", "logprobs": True}
    choice = (await stand.chat(user("look"), **fields, chat_template_kwargs={"enable_thinking": False}))["choices"][0]
    [row] = stand.recorded()
    assert row.given and row.misfit and choice["message"]["content"].startswith("<tool_call>")
    tokens = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert tokens == "no call" and len(choice["logprobs"]["content"]) == len(row.logprobs) - 1
