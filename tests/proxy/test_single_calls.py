"""An answer that may have one tool call ends with it: in every format and dialect, with the tokens it was made of.

The scripted engine writes two calls; what it sends behind the first one is no part of the row.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted import ScriptedReply
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import SHELL, Serve, Stand, shell_call, user
from tests.proxy.test_routed_experts import expected, mixture, stand_for
from tests.proxy.written import SAMPLES, TOOLS, WRITERS
from tests.proxy.zoo import FAMILIES, make_zoo
from trainer.data.assemble import merge, why_not_trainable

__all__ = ["mixture"]
CALLS = [*SAMPLES["closing tags"], *SAMPLES["two"]]
SHOWN = [name for name, family in FAMILIES.items() if family.calls and not family.real and family.forgets != "all"]
ASKED: dict[str, Any] = {"parallel_tool_calls": False, "tools": TOOLS}


@pytest.fixture(scope="module")
def zoo(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    return make_zoo(tiny_model, tmp_path_factory.mktemp("zoo"))


def check_row(stand: Stand, template: ChatTemplate, text: str, index: int = 0) -> None:
    """The row ends with the call, has a logprob and a version for each token, and is trained."""
    row = stand.recorded()[index]
    assert template.decode(row.sampled) == text
    assert (len(row.logprobs), row.versions[-1].end, row.finish_reason) == (
        len(row.sampled),
        len(row.sampled),
        "tool_calls",
    )
    rows = merge(stand.recorded(), 1.0, Counter(), why_not_trainable)
    assert sum(int(each.trained.sum()) for each in rows) == sum(len(item.sampled) for item in stand.recorded())


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("way", WRITERS)
async def test_the_answer_ends_with_its_first_call(serve: Serve, template: ChatTemplate, way: str, tokens: int) -> None:
    form, writer = WRITERS[way]
    text = writer(CALLS)
    stand = await serve(lambda prompt, ids: ScriptedReply(text, tokens_per_event=tokens), tool_format=form)
    answer = (await stand.chat(user("go"), **ASKED))["choices"][0]
    assert len(answer["message"]["tool_calls"]) == 1 and answer["finish_reason"] == "tool_calls"
    [row] = stand.recorded()
    sampled = template.decode(row.sampled)
    assert text.startswith(sampled.rstrip("\n")) and len(sampled) < len(text) - 20
    check_row(stand, template, sampled)


async def test_the_engine_is_stopped(serve: Serve, template: ChatTemplate) -> None:
    text = f"{shell_call('ls')}\n{shell_call('pwd' * 500)}"
    stand = await serve(lambda prompt, ids: ScriptedReply(text, seconds_per_token=0.02))
    await stand.chat(user("go"), tools=[SHELL], parallel_tool_calls=False)
    check_row(stand, template, shell_call("ls"))
    assert stand.engine is not None and stand.engine.aborted == 1


@pytest.mark.parametrize("name", SHOWN)
async def test_the_next_turn_continues_it_and_closes_its_section(
    serve: Serve, zoo: dict[str, ChatTemplate], name: str
) -> None:
    template, family = zoo[name], FAMILIES[name]
    both = ("I think.</think>" if family.thinks == "" else "") + WRITERS[family.way][1](SAMPLES["two"])
    stand = await serve(lambda prompt, ids: ScriptedReply(both, tokens_per_event=2), model=template.directory)
    asked: dict[str, Any] = {**ASKED, "chat_template_kwargs": family.options}
    message = (await stand.chat(user("go"), **asked))["choices"][0]["message"]
    [call] = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "ok"}
    assert (await stand.chat(user("go"), message, result, **asked))["status"] == 200
    first, second = stand.recorded()
    assert second.follows == first.id and stand.path(1)[: len(stand.path(0))] == stand.path(0)
    prompt = template.decode(stand.path(1)[: second.prompt_length])
    opened, closed = template.form.section, template.form.section_end
    assert prompt.count(closed) >= prompt.count(opened) if opened else True


async def test_a_call_in_reasoning_does_not_end_it(serve: Serve, template: ChatTemplate) -> None:
    text = f"<think>\nI could write {shell_call('pwd')} first\n</think>\n\nI look.\n{shell_call('ls')}"
    stand = await serve(lambda prompt, ids: ScriptedReply(text + "\n" + shell_call("pwd"), tokens_per_event=1))
    answer = await stand.chat(user("go"), parallel_tool_calls=False, tools=[SHELL])
    message = answer["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == ("I look.", 1)
    check_row(stand, template, text)


async def test_an_answer_without_calls_ends_by_itself(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "no need")
    answer = (await stand.chat(user("go"), parallel_tool_calls=False, tools=[SHELL]))["choices"][0]
    assert (answer["finish_reason"], answer["message"]["content"]) == ("stop", "no need")
    assert stand.engine is not None and stand.engine.aborted == 0


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}}
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [user("go")], "tools": [SHELL], "parallel_tool_calls": False}),
    "responses": (
        "/v1/responses",
        {
            "input": "go",
            "tools": [{"type": "function", "name": "shell", "parameters": SCHEMA}],
            "parallel_tool_calls": False,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": [user("go")],
            "max_tokens": 4000,
            "tools": [{"name": "shell", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    ),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_every_dialect_that_can_ask_for_it(
    serve: Serve, template: ChatTemplate, dialect: str, streamed: bool
) -> None:
    text = "I look.\n" + shell_call("ls")
    stand = await serve(lambda prompt, ids: f"{text}\n{shell_call('pwd')}")
    path, body = DIALECTS[dialect]
    async with stand.send(path, {"model": "tiny", **body, "stream": streamed}) as answer:
        assert answer.status == 200
        written = (await answer.read()).decode()
    assert "ls" in written and "pwd" not in written
    check_row(stand, template, text)


async def test_experts_are_recorded_up_to_the_call(serve: Serve, mixture: Path) -> None:  # noqa: F811
    reply = ScriptedReply(f"{shell_call('ls')}\n{shell_call('pwd')}", tokens_per_event=4)
    stand = await stand_for(serve, mixture, lambda prompt, ids: reply)
    await stand.chat(user("go"), parallel_tool_calls=False, tools=[SHELL])
    [row] = stand.recorded()
    assert row.experts is not None and row.experts.ids == expected(stand.path(0), row)
    assert row.experts.end == len(stand.path(0)) - 1


async def test_a_retry_gets_the_one_call_that_was_recorded(serve: Serve) -> None:
    reply = ScriptedReply(f"{shell_call('ls')}\n{shell_call('pwd')}", tokens_per_event=1)
    stand = await serve(lambda prompt, ids: reply)
    many = (await stand.chat(user("go"), tools=[SHELL]))["choices"][0]["message"]["tool_calls"]
    one = (await stand.chat(user("go"), tools=[SHELL], parallel_tool_calls=False))["choices"][0]["message"]
    assert (len(many), len(one["tool_calls"]), len(stand.recorded())) == (2, 1, 2)
