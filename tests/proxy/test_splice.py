"""Exact tokens across turns: what was sampled stands in the next prompt, and nothing else ever does.

Every test runs on the scripted words as a tokenizer writes them, and on tokens that a model chooses: the same words cut
at random, with a piece of what the real engine sampled at temperature 1 in them (tests/proxy/play.py).
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from proxy.engine.scripted import Fault, Script, ScriptedReply
from proxy.engine.sglang import Sglang
from proxy.pool.rollouts.attempts import by_key
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import SHELL, Seen, Serve, Stand, shell_call, user
from tests.proxy.play import UNFRIENDLY, Speaker, sample, unfriendly
from tests.proxy.zoo import FAMILIES

ODD_CALL = '<tool_call>\n{"arguments":  {"command": "ls"}, "name":"shell"}\n</tool_call>'
"""Means the same as the template's own form of the call, in other tokens."""


class Model:
    """Says what a script says, in its own tokens; keeps what it said."""

    def __init__(self, template: ChatTemplate, sampled: Sequence[Sequence[int]]):
        self.turns: list[list[int]] = []
        self._speaker = Speaker(FAMILIES["Qwen3"], template, sampled, random.Random(0))

    def of(self, script: Script) -> Script:
        def speak(prompt: str, ids: Sequence[int]) -> ScriptedReply | Fault:
            answer = script(prompt, ids)
            reply = ScriptedReply(answer) if isinstance(answer, str) else answer
            if isinstance(reply, Fault) or reply.ids:
                return reply
            self.turns.append(self._speaker.spoken(reply.text))
            return ScriptedReply("", end=reply.end, ids=tuple(self.turns[-1]))

        return speak


@pytest.fixture(scope="module")
def model(template: ChatTemplate, sglang_engine: Sglang) -> Iterator[Model]:
    async def answers() -> list[list[int]]:
        prompt = template.encode(template.render([user("go on")], ()))
        return await asyncio.gather(*(sample(sglang_engine.url, prompt, template.ends, 30) for _ in range(24)))

    model = Model(template, asyncio.run(answers()))
    yield model
    assert unfriendly(template, model.turns) >= UNFRIENDLY


@pytest.fixture(params=["written", "sampled"])
def serve(request: pytest.FixtureRequest, serve: Serve) -> Serve:
    """A gateway before an engine that speaks in the tokenizer's tokens, or in a model's."""
    if request.param == "written":
        return serve
    model: Model = request.getfixturevalue("model")

    async def start(script: Script, **config: Any) -> Stand:
        return await serve(model.of(script), **config)

    return start


def tool_result(message: dict[str, Any], text: str = "file") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


async def two_turns(stand: Stand, change: Any = None, **fields: Any) -> tuple[list[int], list[int]]:
    """A call, its echo (changed by `change`) with a tool result, and the paths of both completions."""
    answer = await stand.chat(user("list"), tools=[SHELL])
    message = answer["choices"][0]["message"]
    echo = change(msgspec.json.decode(msgspec.json.encode(message))) if change else message
    await stand.chat(user("list"), echo, tool_result(message), tools=[SHELL], **fields)
    return stand.path(0), stand.path(1)


def script(prompt: str, ids: Any) -> str:
    return "done" if "<tool_response>" in prompt else ODD_CALL


async def test_sampled_tokens_are_the_prefix_of_the_next_prompt(serve: Serve) -> None:
    stand = await serve(script)
    first, second = await two_turns(stand)
    row = stand.recorded()[1]
    assert second[: len(first)] == first
    assert (row.prefix_of, row.prefix_length, row.follows) == (
        stand.recorded()[0].id,
        len(first),
        stand.recorded()[0].id,
    )


async def test_the_joined_text_is_the_template_with_the_raw_turn(serve: Serve, template: ChatTemplate) -> None:
    seen = Seen(script)
    stand = await serve(seen)
    await two_turns(stand)
    raw = {"role": "assistant", "content": template.decode(stand.recorded()[0].sampled[:-1])}
    messages = [user("list"), raw, {"role": "tool", "content": "file"}]
    assert seen.prompts[1] == template.render(messages, [SHELL])


def reserialised(message: dict[str, Any]) -> dict[str, Any]:
    message["tool_calls"][0]["function"]["arguments"] = '{ "command" : "\\u006cs" }'
    return message


def other_id(message: dict[str, Any]) -> dict[str, Any]:
    message["tool_calls"][0]["id"] = "renamed"
    return message


def text_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"] or ""}], "provider_specific_fields": {}}


@pytest.mark.parametrize("change", [reserialised, other_id, text_parts])
async def test_an_echo_of_equal_meaning_is_joined(serve: Serve, change: Any) -> None:
    first, second = await two_turns(await serve(script), change)
    assert second[: len(first)] == first


def other_command(message: dict[str, Any]) -> dict[str, Any]:
    message["tool_calls"][0]["function"]["arguments"] = '{"command": "pwd"}'
    return message


def other_name(message: dict[str, Any]) -> dict[str, Any]:
    message["tool_calls"][0]["function"]["name"] = "invalid"
    return message


def added_text(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": "I think"}


@pytest.mark.parametrize("change", [other_command, other_name, added_text])
async def test_an_echo_that_was_changed_is_served_as_sent(serve: Serve, template: ChatTemplate, change: Any) -> None:
    stand = await serve(script)
    first, second = await two_turns(stand, change)
    row = stand.recorded()[1]
    assert row.follows == stand.recorded()[0].id and row.prefix_length < len(first)
    assert second[: row.prompt_length] == template.encode(template.decode(second[: row.prompt_length]))


async def test_another_system_prompt_is_another_branch(serve: Serve) -> None:
    stand = await serve(script)
    message = (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["message"]
    await stand.chat({"role": "system", "content": "new"}, user("list"), message, tool_result(message), tools=[SHELL])
    row = stand.recorded()[1]
    assert row.prefix_length < 5 and row.follows is None


async def test_a_reply_quoted_in_another_conversation_is_not_continued_there(serve: Serve) -> None:
    """Agents do this when they begin again from a summary that the model wrote about the history."""
    stand = await serve(lambda prompt, ids: "a summary")
    message = (await stand.chat(user("sum up: ...")))["choices"][0]["message"]
    await stand.chat(user("what did we do?"), message, user("go on"))
    assert stand.recorded()[1].follows is None


@pytest.mark.parametrize("reply", ["ok", "<think>\nhm\n</think>\n\nok"])
@pytest.mark.parametrize("restarted", [False, True])
async def test_conversations_with_equal_replies_stay_apart(serve: Serve, reply: str, restarted: bool) -> None:
    """The second case: a template that drops the reasoning, so that no tokens tell which one goes on."""
    stand = await serve(lambda prompt, ids: reply)
    message = [(await stand.chat(user(f"task {i}")))["choices"][0]["message"] for i in range(4)][0]
    stand = await serve(lambda prompt, ids: reply) if restarted else stand
    for i in (1, 0):
        await stand.chat(user(f"task {i}"), message, user("more"))
    rows = stand.recorded()
    assert [row.follows for row in rows[4:]] == [rows[1].id, rows[0].id]


async def test_other_tools_are_another_branch_of_the_conversation(serve: Serve) -> None:
    stand = await serve(script)
    message = (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["message"]
    await stand.chat(user("list"), message, tool_result(message), user("now sum up"))
    first, second = stand.recorded()
    assert second.follows == first.id and second.prefix_length < 5


async def test_a_tool_result_that_is_shortened_later_is_another_branch_of_the_conversation(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "done" if prompt.count("<tool_response>") > 1 else ODD_CALL)
    turns: list[Any] = [user("list")]
    for _ in range(2):
        message = (await stand.chat(*turns, tools=[SHELL]))["choices"][0]["message"]
        turns += [message, tool_result(message)]
    turns[2] = tool_result(turns[1], "cleared")
    await stand.chat(*turns, tools=[SHELL])
    first, second, third = stand.recorded()
    assert (third.follows, third.prefix_of) == (second.id, second.id)
    assert len(stand.path(0)) < third.prefix_length < len(stand.path(1)) - 10


async def test_faithful_never_joins(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(script, history="faithful")
    first, second = await two_turns(stand)
    assert second[: len(first)] != first
    assert stand.recorded()[1].follows == stand.recorded()[0].id


async def test_a_cut_turn_goes_on_with_the_templates_end(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply("one two", end=False))
    message = (await stand.chat(user("count")))["choices"][0]["message"]
    await stand.chat(user("count"), message, user("on"))
    first, second = stand.path(0), stand.path(1)
    assert second[: len(first)] == first and second[len(first)] == template.end


async def test_an_unusual_tokenisation_survives(serve: Serve, template: ChatTemplate) -> None:
    """Sampled ids that the tokenizer would never choose for their own text."""
    letters = tuple(token for letter in "hello" for token in template.encode(letter))
    assert list(letters) != template.encode("hello")
    stand = await serve(lambda prompt, ids: ScriptedReply("", ids=letters))
    message = (await stand.chat(user("x")))["choices"][0]["message"]
    await stand.chat(user("x"), message, user("y"))
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)


async def test_dropped_reasoning_follows_the_template(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(lambda prompt, ids: "<think>\nhm\n</think>\n\nyes")
    message = (await stand.chat(user("a?")))["choices"][0]["message"]
    await stand.chat(user("a?"), message, user("b?"))
    row = stand.recorded()[1]
    text = template.decode(stand.path(1)[: row.prompt_length])
    assert "<think>" not in text and row.prefix_length < len(stand.path(0)) and row.follows is not None


THOUGHT_CALL = "<think>\nI list.</think>" + ODD_CALL
"""Reasoning that ends without the line end which the template puts there."""


async def counted(stand: Stand) -> dict[str, int]:
    async with stand.http.get(f"{stand.url}/health") as answer:
        counts: dict[str, int] = (await answer.json())["continued"]
    return counts


async def test_reasoning_keeps_its_own_line_ends(serve: Serve) -> None:
    first, second = await two_turns(await serve(lambda prompt, ids: THOUGHT_CALL))
    assert second[: len(first)] == first


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    del message["reasoning_content"]
    return message


async def test_reasoning_that_is_not_echoed_is_put_back_and_counted(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: THOUGHT_CALL)
    first, second = await two_turns(stand, without_reasoning)
    assert second[: len(first)] == first
    assert await counted(stand) == {"reasoning_restored": 1}
    async with stand.http.get(f"{stand.url}/metrics") as answer:
        assert 'blackforge_continued_calls_total{how="reasoning_restored"} 1' in await answer.text()


async def test_reasoning_that_the_template_drops_is_not_put_back(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(lambda prompt, ids: "<think>QXQX</think>yes")
    message = (await stand.chat(user("a?")))["choices"][0]["message"]
    await stand.chat(user("a?"), without_reasoning(message), user("b?"))
    prompt = template.decode(stand.path(1)[: stand.recorded()[1].prompt_length])
    assert "QXQX" not in prompt and "yes" in prompt
    assert await counted(stand) == {"branched": 1}


async def test_a_fork_keeps_the_turns_before_it(serve: Serve) -> None:
    """A changed tool result: the call before it stays as sampled, the turn behind it is rendered as it was sent."""
    stand = await serve(script)
    message = (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["message"]
    first = [user("list"), message, tool_result(message, "long output")]
    done = (await stand.chat(*first, tools=[SHELL]))["choices"][0]["message"]
    await stand.chat(user("list"), message, tool_result(message, "[masked]"), done, user("more"), tools=[SHELL])
    row = stand.recorded()[2]
    assert stand.path(2)[: len(stand.path(0))] == stand.path(0)
    assert row.follows == stand.recorded()[1].id and row.prefix_length < len(stand.path(1))


async def test_a_stop_string_begins_a_new_branch(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "one STOP", max_new_tokens=50)
    message = (await stand.chat(user("count"), stop=["STOP"]))["choices"][0]["message"]
    await stand.chat(user("count"), message, user("on"))
    assert stand.recorded()[1].prefix_length < len(stand.path(0))
    assert await counted(stand) == {"ended_otherwise": 1}


async def test_a_turn_sampled_through_another_gateway_is_joined(serve: Serve) -> None:
    stand, other = await serve(script), await serve(script)
    await other.chat(user("hello"))
    message = (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["message"]
    await other.chat(user("list"), message, tool_result(message), tools=[SHELL])
    rows = other.recorded()
    assert other.path(2)[: len(other.path(1))] == other.path(1) and rows[2].follows == rows[1].id


async def test_equal_replies_in_a_row_keep_their_order(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "again")
    messages = [user("0")]
    for turn in range(1, 5):
        answer = await stand.chat(*messages)
        messages += [answer["choices"][0]["message"], user(str(turn))]
    rows = stand.recorded()
    assert [row.follows for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert all(stand.path(i)[: len(stand.path(i - 1))] == stand.path(i - 1) for i in range(1, 4))


async def test_branches_share_what_they_have_in_common(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(user("one long question about everything and then A"))
    await stand.chat(user("one long question about everything and then B"))
    rows = stand.recorded()
    assert rows[1].prefix_of == rows[0].id and rows[1].follows is None
    assert len(rows[1].prompt_tail) < len(rows[0].prompt_tail) / 2


async def test_a_restarted_proxy_goes_on_where_it_was(serve: Serve) -> None:
    stand = await serve(script)
    message = (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["message"]
    again = await serve(script)
    await again.chat(user("list"), message, tool_result(message), tools=[SHELL])
    row = again.recorded()[1]
    assert again.path(1)[: len(again.path(0))] == again.path(0)
    assert row.follows == row.prefix_of == again.recorded()[0].id


async def test_sessions_do_not_see_each_other(serve: Serve) -> None:
    stand = await serve(script)
    message = (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["message"]
    await stand.chat(user("list"), message, tool_result(message), tools=[SHELL], key="other")
    (row,) = stand.recorded("other")
    assert row.follows is None and row.prefix_of is None
    assert by_key(stand.pool, "other") != by_key(stand.pool, "agent")


async def test_plain_turns_of_a_call_in_the_templates_form(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "done" if "<tool_response>" in prompt else shell_call("ls"))
    first, second = await two_turns(stand)
    assert second[: len(first)] == first
