"""Every tool-call format through the gateway: typed calls to the agent, and its turns joined when they come back."""

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.config import load_config
from proxy.engine.scripted import ScriptedReply
from proxy.pool.errors import UserError
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import Serve, Stand, user
from tests.proxy.written import SAMPLES, TOOLS, WRITERS

EVERY = pytest.mark.parametrize("way", WRITERS)
CALLS = [*SAMPLES["every type"], *SAMPLES["strings that look typed"]]


async def stand_for(serve: Serve, way: str) -> Stand:
    """A gateway whose engine answers with CALLS in this way of writing, and `done` after tool results."""
    form, writer = WRITERS[way]
    turn = writer(CALLS)
    return await serve(lambda prompt, ids: "done" if "<tool_response>" in prompt else turn, tool_format=form)


def results(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message["tool_calls"]]


@EVERY
async def test_calls_arrive_typed_and_the_next_turn_is_joined(serve: Serve, way: str) -> None:
    stand = await stand_for(serve, way)
    message = (await stand.chat(user("go"), tools=TOOLS))["choices"][0]["message"]
    called = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert called == CALLS and message["content"] is None
    await stand.chat(user("go"), message, *results(message), tools=TOOLS)
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)


@EVERY
async def test_a_restarted_proxy_joins_without_the_schemas(serve: Serve, way: str) -> None:
    stand = await stand_for(serve, way)
    message = (await stand.chat(user("go"), tools=TOOLS))["choices"][0]["message"]
    again = await stand_for(serve, way)
    await again.chat(user("go"), message, *results(message), tools=TOOLS)
    assert again.path(1)[: len(again.path(0))] == again.path(0)
    assert again.recorded()[1].follows == again.recorded()[0].id


@EVERY
async def test_streamed_calls_are_the_same(serve: Serve, way: str) -> None:
    form, writer = WRITERS[way]
    stand = await serve(lambda prompt, ids: ScriptedReply(writer(CALLS), tokens_per_event=1), tool_format=form)
    events = await stand.stream(user("go"), tools=TOOLS)
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == CALLS
    assert not any(delta.get("content") for delta in deltas)


async def test_a_changed_argument_is_not_joined(serve: Serve) -> None:
    stand = await stand_for(serve, "glm45")
    message = (await stand.chat(user("go"), tools=TOOLS))["choices"][0]["message"]
    message["tool_calls"][0]["function"]["arguments"] = json.dumps({**CALLS[0][1], "count": "-7"})
    await stand.chat(user("go"), message, *results(message), tools=TOOLS)
    first, second = stand.recorded()
    assert second.follows == first.id and second.prefix_length < len(stand.path(0))


def test_the_tiny_model_says_by_its_template_what_it_speaks(tiny_model: Path) -> None:
    assert ChatTemplate(tiny_model).form.openers == ("<tool_call>",)


def test_an_unknown_format_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('[engine]\nmodel = "m"\ntool_format = "yaml"\n')
    with pytest.raises(UserError, match="engine.tool_format = 'yaml' is unknown; choose from auto, qwen, hermes"):
        load_config(config)
