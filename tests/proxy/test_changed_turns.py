"""Agents that change their own turns go on in the same conversation, and large integers survive JavaScript."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from proxy.pool.completions.labels import labels
from proxy.prompt.continuation.meaning import as_javascript, meaning, without_reasoning
from tests.conftest import need
from tests.proxy.conftest import SHELL, Serve, Stand, shell_call, user

Message = dict[str, Any]
SYSTEM = {"role": "system", "content": "Work with the shell."}


def calls_in_turn(prompt: str, ids: Any) -> str:
    """Text and a call each turn, told apart by their number; after four, the end."""
    turn = prompt.count("<|im_start|>assistant")
    return "All is done." if turn > 4 else f"I look at part {turn}.\n{shell_call(f'ls {turn}')}"


def without_text(history: list[Message], message: Message, result: Message) -> list[Message]:
    """CrewAI's way: the text beside calls is dropped."""
    return [*history, {**message, "content": None}, result]


def merged(history: list[Message], message: Message, result: Message) -> list[Message]:
    """Mastra's way: the calls of all steps stand in one message, and their results behind it."""
    calls = [call for one in [*history, message] for call in one.get("tool_calls", ())]
    results = [one for one in history if one["role"] == "tool"]
    return [*history[:2], {"role": "assistant", "content": None, "tool_calls": calls}, *results, result]


def in_words(history: list[Message], message: Message, result: Message) -> list[Message]:
    """smolagents' way: the calls become text, their results a user's message that names the call."""
    said = {"role": "assistant", "content": f"Calling tools:\n{[call['function'] for call in message['tool_calls']]}"}
    return [*history, said, user(f"Call id: {result['tool_call_id']}\nObservation:\n{result['content']}")]


async def played(stand: Stand, change: Callable[[list[Message], Message, Message], list[Message]]) -> list[Message]:
    """Five calls of an agent that changes each turn so; returns its last request's messages."""
    history: list[Message] = [SYSTEM, user("tidy up")]
    for turn in range(5):
        message = (await stand.chat(*history, tools=[SHELL]))["choices"][0]["message"]
        if turn < 4:
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"file {turn}"}
            history = change(history, message, result)
    return history


@pytest.mark.parametrize("change", [without_text, in_words])
async def test_each_turn_goes_on_from_the_one_that_the_agent_has_changed(serve: Serve, change: Any) -> None:
    stand = await serve(calls_in_turn)
    await played(stand, change)
    rows = stand.recorded()
    assert [row.follows for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert [row.prefix_of for row in rows[1:]] == [row.id for row in rows[:-1]]
    assert all(row.prefix_length >= rows[0].prompt_length - 5 for row in rows[1:])  # the shared beginning is kept
    assert set(labels(rows).values()) == {"main"}


async def test_turns_that_were_put_into_one_message_are_all_behind_the_next(serve: Serve) -> None:
    def script(prompt: str, ids: Any) -> str:
        turn = prompt.count("<tool_response>")
        return "All is done." if turn > 3 else f"I look at part {turn}.\n{shell_call(f'ls {turn}')}"

    stand = await serve(script)
    await played(stand, merged)
    rows = stand.recorded()
    assert [row.follows for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert set(labels(rows).values()) == {"main"}
    assert [row.shape and row.shape.turns for row in rows] == [0, 1, 2, 3, 4]


async def test_a_stop_string_that_is_put_back_goes_on(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "<code>look()</code> and more")
    message = (await stand.chat(user("count"), stop=["</code>"]))["choices"][0]["message"]
    assert message["content"] == "<code>look()"
    await stand.chat(user("count"), {**message, "content": message["content"] + "</code>"}, user("Observation: 3"))
    first, second = stand.recorded()
    assert second.follows == first.id


async def test_of_two_turns_after_one_history_the_one_that_is_quoted_goes_on(serve: Serve) -> None:
    answers = iter(["The first answer of the two.", "Quite another answer it is.", "done"])
    stand = await serve(lambda prompt, ids: next(answers))
    said = [(await stand.chat(user("which?")))["choices"][0]["message"]["content"] for _ in range(2)]
    await stand.chat(user("which?"), {"role": "assistant", "content": f"Thought: {said[0]}"}, user("go on"))
    first, _, third = stand.recorded()
    assert third.follows == first.id


async def test_a_turn_of_the_agents_own_making_continues_nothing(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "Let us see what there is to do.")
    await stand.chat(user("which?"))
    await stand.chat(user("which?"), {"role": "assistant", "content": "An example of mine."}, user("go on"))
    assert stand.recorded()[1].follows is None


async def test_a_turn_that_begins_alike_continues_nothing(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "Yes")
    await stand.chat(user("which?"))
    await stand.chat(user("which?"), {"role": "assistant", "content": "Yes, and here is an example."}, user("go on"))
    assert stand.recorded()[1].follows is None


# ---- large integers


def in_javascript(texts: list[str]) -> list[str]:
    """What Node.js writes after it has read each JSON text."""
    need("Node.js (apt-get install nodejs)", shutil.which("node") is not None)
    code = (
        "console.log(JSON.stringify(JSON.parse(require('fs').readFileSync(0)).map(x => JSON.stringify(JSON.parse(x)))))"
    )
    done = subprocess.run(["node", "-e", code], input=json.dumps(texts), capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def turn_of(arguments: str) -> Message:
    return {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_integers_change_as_javascript_changes_them() -> None:
    choose = random.Random(0)
    numbers = [choose.getrandbits(bits) * choose.choice([1, -1]) for bits in range(1, 120) for _ in range(20)]
    numbers += [2**53, 2**53 + 1, 2**64 - 1, 2**64, 10**20, 10**21 - 1, 10**21, 10**21 + 1]
    texts = [json.dumps({"x": [number, {"y": number}], "z": 0.1}) for number in numbers]
    for text, echo in zip(texts, in_javascript(texts), strict=True):
        ours, theirs = (without_reasoning(meaning(turn_of(each))) for each in (text, echo))
        assert as_javascript(ours) == theirs, (text, echo)


NEAR = [123456789123456789, 123456789123456784]
"""Two integers that are one double."""


def numbered(number: int) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {{"command": {number}}}}}\n</tool_call>'


async def asked(stand: Stand) -> Message:
    message: Message = (await stand.chat(user("list"), tools=[SHELL]))["choices"][0]["message"]
    return message


async def test_an_echo_through_javascript_is_joined_and_another_integer_is_not(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "done" if "<tool_response>" in prompt else numbered(NEAR[0]))
    message = await asked(stand)
    call = message["tool_calls"][0]
    (echo,) = in_javascript([call["function"]["arguments"]])
    assert echo != call["function"]["arguments"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "file"}
    for arguments, joined in ((echo, True), (echo.replace("780", "784"), False)):
        changed = {**message, "tool_calls": [{**call, "function": {"name": "shell", "arguments": arguments}}]}
        await stand.chat(user("list"), changed, result, tools=[SHELL])
        row, length = stand.recorded()[-1], len(stand.path(0))
        assert (row.prefix_length >= length) == joined, arguments
        assert row.follows == stand.recorded()[0].id  # by its call's id, where the integer is another


@pytest.mark.parametrize("said", [0, 1])
async def test_the_very_integers_come_first(serve: Serve, said: int) -> None:
    numbers = iter(NEAR)
    stand = await serve(lambda prompt, ids: "done" if "<tool_response>" in prompt else numbered(next(numbers)))
    messages = [await asked(stand) for _ in NEAR]
    echo = messages[said]
    echo["tool_calls"][0]["id"] = "mine"  # as agents do that make their own ids
    await stand.chat(user("list"), echo, {"role": "tool", "tool_call_id": "mine", "content": "file"}, tools=[SHELL])
    assert stand.recorded()[-1].follows == stand.recorded()[said].id
