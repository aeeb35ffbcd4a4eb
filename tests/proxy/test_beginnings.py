"""Attempts that begin with a recorded one: answers come from the recording, in every dialect, and then the engine's.

Not covered here: which recorded attempt a group begins with (tests/harness/test_anchors.py), and the account of what
was replayed (tests/pool/test_starts.py).
"""

import os
import shutil
import signal
from array import array
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from sqlalchemy import select, update

from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.scripted import ScriptedEngine
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import of_attempt, paths
from proxy.pool.database import Pool, open_pool
from proxy.pool.inspect.verify import verify
from proxy.pool.processes.deliveries import mark_undelivered
from proxy.pool.rollouts.attempts import Attempt, Ending, by_key, close_attempt, open_attempt, open_session
from proxy.pool.rollouts.groups import GroupOptions, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.rollouts.starts import Start, left_replay
from proxy.pool.schema import attempts
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from tests.pool.make import TASK
from tests.proxy.conftest import SHELL, Seen, Serve, Stand, listening, served, shell_call, user
from tests.proxy.test_replay import ANSWER, REQUESTS, reproducible
from tests.proxy.test_routed_experts import MIXTURE, expected, stand_for
from tests.proxy.test_secrets import running

SECOND, THIRD = f"I read.\n{shell_call('cat b.txt')}", "done"
TITLE = [user("Find a title.")]


class Model:
    """A model of three turns. Each answer is another one; `prompts` are those that it was asked."""

    def __init__(self) -> None:
        self.prompts: list[array[int]] = []

    def __call__(self, prompt: str, ids: Any) -> str:
        self.prompts.append(array("i", ids))
        if "Find a title" in prompt:
            return f"title {len(self.prompts)}"
        turns = prompt.count("<tool_response>")  # the first turn makes two calls, the second one
        return (ANSWER, f"{len(self.prompts)} {SECOND}", f"{len(self.prompts)} {THIRD}")[min(2, (turns + 1) // 2)]


def begun(pool: Pool, recorded: str | int, turns: int) -> tuple[Attempt, str]:
    """An attempt of a run that begins with a recorded one, named by its key or number; and its own key."""
    of = by_key(pool, recorded) if isinstance(recorded, str) else None
    start = Start(of.id, turns, of.dated_at) if of else Start(int(recorded), turns, 0.0)
    run_id = open_run(pool, "run", "collect", {}).id
    (rollout,) = open_group(pool, run_id, TASK, 1, GroupOptions(start=start))
    assert rollout.start == start
    return open_attempt(pool, rollout.rollout_id, "command")


def results(message: dict[str, Any], text: str = "b.txt") -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in message.get("tool_calls", ())]


async def converse(stand: Stand, key: str, turns: int = 3, title: bool = False) -> list[dict[str, Any]]:
    """An agent's conversation of so many turns, beside a call for a title; the messages of the model."""
    messages, said = [user("hi")], []
    if title:
        assert (await stand.chat(*TITLE, key=key))["status"] == 200
    for _ in range(turns):
        answer = await stand.chat(*messages, key=key, tools=[SHELL])
        assert answer["status"] == 200, answer
        said.append(answer["choices"][0]["message"])
        messages += [said[-1], *results(said[-1])]
    return said


def own_path(pool: Pool, item: Completion) -> list[int]:
    return paths(of_attempt(pool, item.attempt_id))[item.id].tolist()


@pytest.mark.parametrize("turns", [1, 2])
async def test_an_agent_is_brought_to_its_turn_and_goes_on_from_there(serve: Serve, turns: int) -> None:
    model = Model()
    stand = await serve(model)
    first = await converse(stand, "agent", title=True)
    recorded, asked = stand.recorded(), len(model.prompts)
    attempt, key = begun(stand.pool, "agent", turns)
    said = await converse(stand, key, title=True)
    played = of_attempt(stand.pool, attempt.id)
    assert said[:turns] == first[:turns] and said[turns:] != first[turns:]
    assert [item.replayed for item in played] == [True] * (turns + 1) + [False] * (3 - turns)
    for item, source in zip(played[: turns + 1], recorded, strict=False):  # the title was recorded first
        assert str(item.untrainable) == f"replayed: {source.id}"
        assert (item.given, item.sampled_count, len(item.logprobs), item.versions) == (
            ((0, len(source.sampled)),), 0, 0, (),
        )  # fmt: skip
        assert own_path(stand.pool, item) == own_path(stand.pool, source)
    sampled, was = played[turns + 1], recorded[turns + 1]
    assert len(model.prompts) == asked + 3 - turns
    assert model.prompts[asked].tolist() == own_path(stand.pool, was)[: was.prompt_length]
    assert sampled.untrainable is None and sampled.follows == played[turns].id
    close_attempt(stand.pool, attempt.id, Ending())
    assert left_replay(stand.pool, attempt.id, attempt.start or Start(0, 0, 0)) is None
    assert [item.label for item in of_attempt(stand.pool, attempt.id)] == ["side", "main", "main", "main"]
    assert verify(stand.pool).damages == []


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_the_recorded_answer_comes_in_every_dialect(serve: Serve, path: str, streamed: bool) -> None:
    answers = iter([ANSWER])
    stand = await serve(lambda prompt, ids: next(answers))
    body = dict(REQUESTS[path])
    if streamed:
        path = path.replace(":generateContent", ":streamGenerateContent?alt=sse")
        body |= {} if "Content" in path else {"stream": True}

    async def ask(key: str) -> Any:
        async with stand.send(path, body, **{"x-api-key": key}) as answer:
            assert answer.status == 200
            lines = (await answer.read()).splitlines()
        lines = [line.removeprefix(b"data: ") for line in lines if line.startswith((b"data: {", b"{"))]
        return [reproducible(msgspec.json.decode(line)) for line in lines]

    first = await ask("agent")
    _, key = begun(stand.pool, "agent", 1)
    assert await ask(key) == first and len(first) > (8 if streamed else 0)


async def test_the_first_request_that_differs_ends_the_attempt_for_the_trainer(serve: Serve) -> None:
    model = Model()
    stand = await serve(model)
    await converse(stand, "agent")
    asked = len(model.prompts)
    attempt, key = begun(stand.pool, "agent", 2)
    (message,) = await converse(stand, key, turns=1)
    other = await stand.chat(user("hi"), message, *results(message, "c.txt"), key=key, tools=[SHELL])
    assert (other["status"], other["error"]["code"]) == (403, "replay_differed")
    words = "differs from completion 2 in messages[2] (tool), 0 characters into its text"
    assert words in other["error"]["message"] and "no further call is served" in other["error"]["message"]
    again = await stand.chat(user("hi"), message, *results(message), key=key, tools=[SHELL])
    assert again["status"] == 403 and len(model.prompts) == asked
    assert words in (left_replay(stand.pool, attempt.id, attempt.start or Start(0, 0, 0)) or "")
    with stand.pool.read() as connection:
        assert words in (connection.scalar(select(attempts.c.differed).where(attempts.c.id == attempt.id)) or "")


async def test_an_agent_that_ends_too_early_has_left_the_recorded_attempt(serve: Serve) -> None:
    stand = await serve(Model())
    await converse(stand, "agent")
    attempt, key = begun(stand.pool, "agent", 2)
    await converse(stand, key, turns=1)
    assert attempt.start is not None
    assert left_replay(stand.pool, attempt.id, attempt.start) == "the agent ended after 1 of the 2 turns of attempt 1"


async def test_a_recorded_attempt_that_has_left_the_pool_cannot_be_repeated(serve: Serve) -> None:
    stand = await serve(Model())
    _, key = begun(stand.pool, 77, 2)
    answer = await stand.chat(user("hi"), key=key, tools=[SHELL])
    assert answer["status"] == 403 and "no answers of attempt 77" in answer["error"]["message"]
    await converse(stand, "agent")
    _, key = begun(stand.pool, "agent", 4)
    answer = await stand.chat(user("hi"), key=key, tools=[SHELL])
    assert answer["status"] == 403 and "has only 3 of its turns" in answer["error"]["message"]


async def test_a_request_behind_the_replayed_turns_is_sampled_while_others_are_not_played_yet(serve: Serve) -> None:
    """Two conversations side by side: the first turn of each was recorded, that of `b` is behind the replayed ones."""
    model = Model()
    stand = await serve(model)
    for text in ("a", "b"):
        await stand.chat(user(text), tools=[SHELL])
    attempt, key = begun(stand.pool, "agent", 1)
    sampled = (await stand.chat(user("b"), key=key, tools=[SHELL]))["choices"][0]["message"]
    goes_on = await stand.chat(user("b"), sampled, *results(sampled, "new"), key=key, tools=[SHELL])
    assert goes_on["status"] == 200
    assert (await stand.chat(user("a"), key=key, tools=[SHELL]))["status"] == 200
    assert [item.replayed for item in of_attempt(stand.pool, attempt.id)] == [False, False, True]


async def test_another_proxy_goes_on_and_a_repeat_gets_the_same_answer(serve: Serve) -> None:
    model = Model()
    stand = await serve(model)
    first = await converse(stand, "agent")
    attempt, key = begun(stand.pool, "agent", 2)
    await converse(stand, key, turns=1)
    other, asked = await serve(model), len(model.prompts)
    for _ in range(2):  # the second time as if the first answer had not arrived
        assert (await converse(other, key, turns=2)) == first[:2]
    assert len(model.prompts) == asked
    assert (await converse(stand, key))[2] != first[2]
    assert attempt.start is not None and left_replay(stand.pool, attempt.id, attempt.start) is None


async def test_answers_to_one_prompt_are_played_in_their_order(serve: Serve) -> None:
    answers = iter(["one", "two", "three"])
    stand = await serve(lambda prompt, ids: next(answers))
    for _ in range(2):
        await stand.chat(user("hi"))
    _, key = begun(stand.pool, "agent", 2)
    said = await stand.chat(user("hi"), key=key, n=2)
    assert [choice["message"]["content"] for choice in said["choices"]] == ["one", "two"]


async def test_an_answer_that_did_not_arrive_is_served_again_up_to_its_stop_string(serve: Serve) -> None:
    answers = iter(["one STOP two", "three"])
    stand = await serve(lambda prompt, ids: next(answers))
    first = await stand.chat(user("hi"), stop=["STOP"])
    attempt, key = begun(stand.pool, "agent", 1)
    assert reproducible(await stand.chat(user("hi"), key=key, stop=["STOP"])) == reproducible(first)
    (played,) = of_attempt(stand.pool, attempt.id)
    mark_undelivered(stand.pool, played.id)
    other = await serve(lambda prompt, ids: next(answers))
    assert reproducible(await other.chat(user("hi"), key=key, stop=["STOP"])) == reproducible(first)
    assert len(of_attempt(stand.pool, attempt.id)) == 1


async def test_an_attempt_that_began_with_another_one_can_be_begun_with(serve: Serve) -> None:
    model = Model()
    stand = await serve(model)
    first = await converse(stand, "agent")
    _, key = begun(stand.pool, "agent", 1)
    second = await converse(stand, key)
    attempt, again = begun(stand.pool, key, 2)
    third = await converse(stand, again)
    assert third[0] == first[0] and third[1] == second[1] and third[2] != second[2]
    assert [item.replayed for item in of_attempt(stand.pool, attempt.id)] == [True, True, False]


async def test_dates_are_those_of_the_recorded_attempt(tiny_model: Path, tmp_path: Path) -> None:
    """The recorded attempt began in the year 2001; its template writes the date."""
    dated = tmp_path / "dated"
    shutil.copytree(tiny_model, dated)
    template = msgspec.json.decode((dated / "tokenizer_config.json").read_bytes())["chat_template"]
    (dated / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}" + template)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        seen = Seen(lambda prompt, ids: f"answer {len(seen.prompts)}")
        engine = await listening(ScriptedEngine(seen, ChatTemplate(dated)).app(), stack)
        config = ProxyConfig(engine=EngineConfig(model=str(dated)), pool=str(tmp_path / "pool.db"))
        pool = open_pool(config.pool)
        open_session(pool, "agent")
        with pool.write() as connection:
            connection.execute(update(attempts).values(opened_at=1e9))
        stand = Stand(await served(Gateway(config, engine), stack), pool, http)
        await stand.chat(user("hi"))
        _, key = begun(pool, "agent", 1)
        said = (await stand.chat(user("hi"), key=key))["choices"][0]["message"]
        assert said["content"] == "answer 1"
        assert (await stand.chat(user("hi"), said, user("and?"), key=key))["status"] == 200
        assert len(seen.prompts) == 2 and seen.prompts[1].startswith("2001")


async def test_kill_9_between_two_replayed_turns_loses_none(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    """A real proxy is killed behind the first replayed turn; the next one is asked for it again, and for the second."""
    model = Model()
    stand = await serve(model)
    first = await converse(stand, "agent")
    attempt, key = begun(stand.pool, "agent", 2)
    settings = tmp_path / "serve.toml"
    engine = f'[engine]\nmodel = "{tiny_model}"\nurl = "http://127.0.0.1:9"\n'  # nobody is there, and nobody is asked
    settings.write_text(f'pool = "{tmp_path / "pool.db"}"\n[proxy]\nport = 0\n{engine}')
    with running(tmp_path / "first.log", "serve", settings) as (url, pid):
        assert await converse(Stand(url, stand.pool, stand.http), key, turns=1) == first[:1]
        os.kill(pid, signal.SIGKILL)
    with running(tmp_path / "second.log", "serve", settings) as (url, _):
        assert await converse(Stand(url, stand.pool, stand.http), key, turns=2) == first[:2]
    rows = of_attempt(stand.pool, attempt.id)
    assert {str(item.untrainable) for item in rows} == {"replayed: 1", "replayed: 2"}
    assert (await converse(stand, key))[2] != first[2]
    assert attempt.start is not None and left_replay(stand.pool, attempt.id, attempt.start) is None


@pytest.mark.parametrize("linger", [60, 0])
async def test_a_client_that_leaves_gets_the_whole_answer_when_it_asks_again(serve: Serve, linger: int) -> None:
    """Whatever is kept of the first call, none of its tokens counts as sampled."""
    stand = await serve(lambda prompt, ids: "word " * 3000, limits={"linger_seconds": linger})
    first = await stand.chat(user("hi"))
    attempt, key = begun(stand.pool, "agent", 1)
    body = {"model": "tiny", "messages": [user("hi")], "stream": True}
    async with stand.post(body, key) as answer:
        await answer.content.readany()
    again = await stand.chat(user("hi"), key=key)
    assert reproducible(again) == reproducible(first) and stand.engine is not None
    rows = of_attempt(stand.pool, attempt.id)
    assert any(item.replayed for item in rows) and {item.sampled_count for item in rows} == {0}
    assert attempt.start is not None and left_replay(stand.pool, attempt.id, attempt.start) is None


async def test_the_experts_of_what_was_replayed_are_asked_for_with_the_first_sampled_turn(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    """A replayed answer has none: another run's weights chose those that were recorded."""
    directory = tmp_path / "mixture"
    shutil.copytree(tiny_model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = msgspec.json.decode((directory / "config.json").read_bytes())
    config |= {"num_hidden_layers": MIXTURE.layers, "num_experts_per_tok": MIXTURE.top_k}
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    stand = await stand_for(serve, directory, Model())
    await converse(stand, "agent")
    attempt, key = begun(stand.pool, "agent", 2)
    await converse(stand, key)
    first, second, sampled = of_attempt(stand.pool, attempt.id)
    assert first.experts is None and second.experts is None and sampled.experts is not None
    path = own_path(stand.pool, sampled)
    assert (sampled.experts.start, sampled.experts.end) == (0, len(path) - 1)
    assert sampled.experts.ids == expected(path, sampled) and verify(stand.pool).damages == []
