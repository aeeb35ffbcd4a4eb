"""Exact tokens over the model families, on turns that a real engine sampled at temperature 1 (tests/proxy/play.py).

What each family's template drops is written in tests/proxy/zoo.py; everything else must stay as it was sampled.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from proxy.config import EngineConfig
from proxy.engine.sglang import Sglang
from proxy.prompt.template import ChatTemplate, TemplateError
from tests.conftest import need
from tests.proxy.play import ECHOES, UNFRIENDLY, Rollout, Speaker, sample, unfriendly
from tests.proxy.written import TOOLS
from tests.proxy.zoo import FAMILIES, Family, make_zoo, make_zoo_model

EVERY = pytest.mark.parametrize("name", FAMILIES)
ANSWERS, LENGTH = 12, 40
"""Sampled for each family: how many, and tokens at most."""
ROLLOUTS = 8


@pytest.fixture(scope="module")
def zoo(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTemplate]:
    return make_zoo(tiny_model, tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    need("sglang", find_spec("sglang") is not None)
    model = tmp_path_factory.mktemp("zoo-model") / "model"
    make_zoo_model(tiny_model, model)
    engine = Sglang(EngineConfig(model=str(model), dtype="float32"), model.parent / "engine.log")
    try:
        engine.wait_healthy()
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def sampled(engine: Sglang, zoo: dict[str, ChatTemplate]) -> dict[str, list[list[int]]]:
    """Answers to each family's prompt at temperature 1, some of them cut by their length early."""
    return asyncio.run(sample_all(engine, zoo))


async def sample_all(engine: Sglang, zoo: dict[str, ChatTemplate]) -> dict[str, list[list[int]]]:
    lengths = [LENGTH if i % 3 else 3 + i for i in range(ANSWERS)]
    asked = [(name, length) for name in zoo for length in lengths]
    hello = [{"role": "user", "content": "go on"}]
    prompts = {name: zoo[name].encode(zoo[name].render(hello, (), **FAMILIES[name].options)) for name in zoo}
    sampled_ids = await asyncio.gather(*(sample(engine.url, prompts[n], zoo[n].ends, length) for n, length in asked))
    answers: dict[str, list[list[int]]] = {name: [] for name in zoo}
    for (name, _), ids in zip(asked, sampled_ids, strict=True):
        answers[name].append(ids)
    return answers


def carried(zoo: dict[str, ChatTemplate], name: str) -> ChatTemplate:
    """The family's template, if it is ours or a package here carries it."""
    need(f"a package with the template of {name}", name in zoo)
    return zoo[name]


def has(message: dict[str, Any], *names: str) -> bool:
    return all(message.get(name) for name in names)


def keeps(family: Family, rollout: Rollout, episode: list[tuple[int, dict[str, Any]]], new_user: bool) -> bool | None:
    """Whether the template leaves the last turn, and all before it in its path, as they were sampled.

    None: that depends on the template, as a turn reasons although its prompt has the model not reason.
    `episode`: the turns since the last user message but for a new one, by their completions.
    """
    index, message = episode[-1]
    if family.thinks == "no" and any(has(turn, "reasoning_content") for _, turn in episode):
        return None
    thinking = any(has(turn_ids, "reasoning_content") or rollout.opened(i) == "<think>" for i, turn_ids in episode)
    if family.one_of and has(message, "content", "tool_calls"):
        return False
    if family.forgets == "all" and rollout.opened(index):
        return False
    return not (new_user and (family.moves or (family.forgets == "old" and thinking)))


def play(rollout: Rollout, speaker: Speaker, turns: int, pure: bool) -> list[list[int]]:
    """Play a conversation of so many turns; check each prompt against what the family keeps; return the sampled ids."""
    family, rng, spoken = rollout.family, speaker.rng, []
    rollout.messages = [{"role": "system", "content": "Be brief & <b>."}, {"role": "user", "content": "first"}]
    episode: list[tuple[int, dict[str, Any]]] = []
    for number in range(turns):
        spoken.append(speaker.as_sampled() if pure else speaker.framed())
        message = rollout.ask(spoken[-1])
        if number:
            check(rollout, keeps(family, rollout, episode, rollout.messages[-1]["role"] == "user"))
        episode = [*episode, (number, message)] if rollout.messages[-1]["role"] == "tool" else [(number, message)]
        calls = message.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": c["id"], "content": f"result {number}\n"} for c in calls]
        rollout.messages.append(rng.choice(ECHOES)(message))
        rollout.messages += results or [{"role": "user", "content": f" and {number}?"}]
    return spoken


def check(rollout: Rollout, expected: bool | None) -> None:
    """The last prompt continues the path before it, or begins a branch that says what the template says."""
    prompt, before = rollout.prompts[-1], rollout.standing(-2)
    text, rendered = rollout.template.decode(prompt.ids), rollout.rendered(rollout.messages)
    kept = prompt.ids[: len(before)] == before
    assert expected is None or kept is expected
    if kept:
        assert rendered.endswith(rollout.template.decode(prompt.ids[len(before) :]))
        ended = rollout.paths[-2]
        assert prompt.ids[: len(ended)] == ended or "ended_otherwise" in prompt.counted
    assert rendered.endswith(prompt.text)
    assert text == rendered or prompt.base is not None


@EVERY
@pytest.mark.parametrize("pure", [True, False], ids=["as sampled", "framed"])
def test_turns_stay_as_they_were_sampled(
    name: str, pure: bool, zoo: dict[str, ChatTemplate], sampled: dict[str, list[list[int]]]
) -> None:
    turns: list[list[int]] = []
    for seed in range(ROLLOUTS):
        rollout = Rollout(FAMILIES[name], carried(zoo, name))
        speaker = Speaker(FAMILIES[name], zoo[name], sampled[name], random.Random(seed))
        turns += play(rollout, speaker, 7, pure)
        last = rollout.builder.build(rollout.call(rollout.messages), True)
        assert rollout.restarted().build(rollout.call(rollout.messages), True).ids == last.ids
    assert unfriendly(zoo[name], turns) >= UNFRIENDLY


Mutation = tuple[str, int, list[dict[str, Any]]]
"""What was changed, in which message, and the conversation that has come of it."""


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_other_systems_are_shown(name: str, zoo: dict[str, ChatTemplate]) -> None:
    """A history may have calls whose arguments are no JSON, or JSON that is no object. A template that shows no results
    of its own calls shows none here."""
    shown = []
    for arguments in ('{"command": "ls -la"}', "ls -la 'x", '["ls -la"]'):
        function = {"name": "shell", "arguments": arguments}
        turn = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": function}],
        }
        result = {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "no such file"}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}, turn, result]
        text = carried(zoo, name).render(messages, (), **FAMILIES[name].options)
        assert "ls -la" in text
        shown.append("no such file" in text)
    assert len(set(shown)) == 1


def mutations(messages: list[dict[str, Any]], rng: random.Random) -> Iterator[Mutation]:
    """Conversations that differ from this one in one place."""
    for at, message in enumerate(messages):
        for what, changed in _changed(message, rng):
            yield what, at, [*messages[:at], changed, *messages[at + 1 :]]
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    at = rng.choice(turns)
    behind = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] != "tool"), len(messages))
    yield "a turn and its results left out", at, messages[:at] + messages[behind:]
    yield "a user's message put before a turn", at, [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


def outgrown(rollout: Rollout) -> Iterator[Mutation]:
    """Tool results that repeat the prompt behind them, up to the turn or beyond, so that the turn seems to follow."""
    messages = rollout.messages
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for number, at in enumerate(turns[1:], 1):
        result = messages[at - 1]["content"].strip()
        _, _, behind = rollout.template.decode(rollout.prompts[number].ids).rpartition(result)
        if messages[at - 1]["role"] == "tool" and len(behind) < 100:
            changed = {**messages[at - 1], "content": f"{result}{behind}junk"}
            yield "a result that outgrows its place", at - 1, [*messages[: at - 1], changed, *messages[at:]]


def _changed(message: dict[str, Any], rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    if message["role"] != "assistant":
        yield "text", {**message, "content": f"{message['content']}."}
        return
    yield "content", {**message, "content": "Other words."}
    yield "reasoning", {**message, "reasoning_content": "Other thoughts."}
    calls = message.get("tool_calls") or []
    for number, call in enumerate(calls):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        for what, other in (
            ("name", {**function, "name": "edit_file"}),
            ("argument", {**function, "arguments": json.dumps(arguments | {"count": str(arguments["count"])})}),
            ("one more argument", {**function, "arguments": json.dumps(arguments | {"text": ""})}),
            ("one argument less", {**function, "arguments": json.dumps({"command": arguments["command"]})}),
        ):
            yield what, {**message, "tool_calls": [*calls[:number], {**call, "function": other}, *calls[number + 1 :]]}
    if len(calls) > 1:
        yield "one call less", {**message, "tool_calls": calls[:1]}


@pytest.fixture(scope="module")
def seen() -> Iterator[set[str]]:
    """The kinds of changes that were made; all of them, over all families."""
    kinds: set[str] = set()
    yield kinds
    assert {"text", "content", "reasoning", "name", "argument", "a result that outgrows its place"} <= kinds


@EVERY
def test_nothing_that_was_changed_is_joined(
    name: str, zoo: dict[str, ChatTemplate], sampled: dict[str, list[list[int]]], seen: set[str]
) -> None:
    for seed in range(2):
        rollout = Rollout(FAMILIES[name], carried(zoo, name))
        speaker = Speaker(FAMILIES[name], zoo[name], sampled[name], random.Random(seed))
        play(rollout, speaker, 5, pure=False)
        original = rollout.rendered(rollout.messages)
        for what, at, messages in chain(mutations(rollout.messages, speaker.rng), outgrown(rollout)):
            seen.add(what)
            unchanged(rollout, messages, original, (what, at))
        rollout.tools = [*TOOLS, {"type": "function", "function": {"name": "more", "parameters": {}}}]
        unchanged(rollout, rollout.messages, original, ("tools", 0))


def unchanged(rollout: Rollout, messages: list[dict[str, Any]], original: str, change: tuple[str, int]) -> None:
    """The prompt of a changed conversation has no path of a turn from the changed message on, and says what is sent.

    Where the template does not show the change, later turns may stay, and so may tokens that a tokenizer would choose.
    """
    try:
        rendered = rollout.rendered(messages)
    except TemplateError:  # Mistral's, where roles do not alternate any more
        return
    prompt = rollout.builder.build(rollout.call(messages), True)
    assert rendered.endswith(prompt.text)
    hidden, at = rendered == original, change[1]
    turns = [i for i, message in enumerate(rollout.messages) if message["role"] == "assistant"]
    for number, index in enumerate(turns):
        path, own = rollout.standing(number), rollout.rows[number].sampled.tolist()
        if prompt.ids[: len(path)] == path:
            friendly = unfriendly(rollout.template, [own]) == 0
            assert index < at or (hidden and (index > at or friendly)), (change, index)
