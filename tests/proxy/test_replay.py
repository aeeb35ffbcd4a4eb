"""Replay of a recorded attempt: the same answers in every dialect, and the place where a request differs."""

import asyncio
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from sqlalchemy import update

from proxy.commands.main import main
from proxy.commands.recorded_attempt import AttemptRecording
from proxy.commands.replay_gateway import ReplayGateway
from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.scripted import Fault, ScriptedEngine, ScriptedReply
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.verify import verify
from proxy.pool.processes.parent import die_with_parent
from proxy.pool.rollouts.attempts import by_key, open_session
from proxy.pool.schema import attempts, completions
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from tests.proxy.conftest import SHELL, Seen, Serve, Stand, listening, served, shell_call, user
from tests.proxy.test_augment import obey, two_turns, varied_key
from tests.proxy.test_cli import wait_until

PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}}
ANSWER = f"<think>\nI need the list. \U0001f980\n</think>\n\nI look.\n{shell_call('ls')}\n{shell_call('pwd')}"
REQUESTS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [user("hi")], "tools": [SHELL]},
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", "name": "shell", "parameters": PARAMETERS}],
    },
    "/v1/messages": {
        "messages": [user("hi")],
        "max_tokens": 900,
        "tools": [{"name": "shell", "input_schema": PARAMETERS}],
    },
    "/v1/completions": {"prompt": "hi", "max_tokens": 900},
    "/v1beta/models/m:generateContent": {
        "contents": [{"parts": [{"text": "hi"}]}],
        "tools": [{"functionDeclarations": [{"name": "shell", "parameters": PARAMETERS}]}],
        "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
    },
}
OWN = ("id", "created", "created_at", "item_id", "responseId", "obfuscation")
"""Fields that differ in every answer. Ids of tool calls stay the same."""

Replay = Callable[..., Awaitable[Stand]]


@pytest.fixture
async def replay(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Replay]:
    """Serve what a stand has recorded for its agent."""
    async with AsyncExitStack() as stack:

        async def start(stand: Stand, *ignored: re.Pattern[str]) -> Stand:
            attempt = by_key(stand.pool, "agent")
            assert attempt is not None
            report, template = tmp_path / "report.jsonl", ChatTemplate(tiny_model)
            recording = AttemptRecording(stand.pool, attempt.id, template, report, ignored=ignored)
            file = str(tmp_path / "replayed.db")
            gateway = ReplayGateway(ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=file), recording)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            return Stand(await served(gateway, stack), open_pool(file), http)

        yield start


def report(tmp_path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in (tmp_path / "report.jsonl").read_bytes().splitlines()]


def reproducible(value: Any) -> Any:
    """The fields of an answer that a replay repeats. Ids of tool calls are among them, since results refer to them."""
    if isinstance(value, list):
        return [reproducible(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    call = value.get("type") in ("function", "tool_use") or "args" in value
    return {name: reproducible(inner) for name, inner in value.items() if call or name not in OWN}


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_whole_answer_is_the_same_again(serve: Serve, replay: Replay, path: str) -> None:
    stand = await serve(lambda prompt, ids: ANSWER)
    first = await stand.ask(path, REQUESTS[path])
    again = await (await replay(stand)).ask(path, REQUESTS[path])
    assert again["status"] in (200, "completed") and reproducible(again) == reproducible(first)


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_streamed_answer_is_the_same_again(serve: Serve, replay: Replay, path: str) -> None:
    path, body = path.replace(":generateContent", ":streamGenerateContent?alt=sse"), dict(REQUESTS[path])
    if "Content" not in path:
        body["stream"] = True
    stand = await serve(lambda prompt, ids: ANSWER)
    first = await stand.events(path, body)
    again = await (await replay(stand)).events(path, body)
    assert len(again) > 8 and reproducible(again) == reproducible(first)


async def test_a_conversation_goes_on_as_it_was_recorded(serve: Serve, replay: Replay) -> None:
    stand = await serve(lambda prompt, ids: "done" if "b.txt" in prompt else ANSWER)
    replayed: Stand | None = None
    for _ in range(2):
        at = replayed or stand
        first = (await at.chat(user("hi"), tools=[SHELL]))["choices"][0]["message"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "b.txt"} for call in first["tool_calls"]]
        last = await at.chat(user("hi"), first, *results, tools=[SHELL], temperature=0.3)
        assert last["choices"][0]["message"]["content"] == "done"
        replayed = replayed or await replay(stand)
    assert replayed is not None
    recorded, played = stand.recorded(), replayed.recorded()
    assert [item.reply for item in played] == [item.reply for item in recorded] and len(recorded) == 2
    assert [item.path_crc for item in played] == [item.path_crc for item in recorded]
    assert played[1].follows == played[0].id and verify(replayed.pool).damages == []


async def test_a_varied_attempt_is_shown_as_it_was_recorded(serve: Serve, tiny_model: Path, tmp_path: Path) -> None:
    stand = await serve(obey)
    key = varied_key(stand)
    name, arguments, recorded = await two_turns(stand, "chat", key)
    attempt = by_key(stand.pool, key)
    assert attempt is not None
    recording = AttemptRecording(stand.pool, attempt.id, ChatTemplate(tiny_model), tmp_path / "report.jsonl")
    gateway = ReplayGateway(
        ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=str(tmp_path / "r.db")), recording
    )
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as http:
        at = Stand(await served(gateway, stack), open_pool(str(tmp_path / "r.db")), http)
        again = await two_turns(at, "chat", "agent")
    assert again[:2] == (name, arguments)
    assert [item.path_crc for item in again[2]] == [item.path_crc for item in recorded]


async def test_answers_to_one_prompt_come_in_order_for_each_key(serve: Serve, replay: Replay) -> None:
    answers = iter(["one", "two", "three"])
    stand = await serve(lambda prompt, ids: next(answers))
    for _ in range(3):
        await stand.chat(user("hi"))
    replayed = await replay(stand)
    for key in ("a", "b"):
        got = [(await replayed.chat(user("hi"), key=key))["choices"][0]["message"]["content"] for _ in range(3)]
        assert got == ["one", "two", "three"]
        more = await replayed.chat(user("hi"), key=key)
        assert more["status"] == 400 and "'3 times' was recorded and '4 times' was sent" in more["error"]["message"]


async def test_what_failed_or_was_abandoned_is_not_played(serve: Serve, replay: Replay) -> None:
    answers = iter([Fault(text="one two", after=1), ScriptedReply("word " * 400, seconds_per_token=0.05), "whole"])
    stand = await serve(lambda prompt, ids: next(answers), limits={"linger_seconds": 0})
    assert (await stand.chat(user("hi")))["status"] == 502
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(stand.chat(user("hi")), 0.3)
    while len(stand.recorded()) < 2:
        await asyncio.sleep(0.05)
    assert (await stand.chat(user("hi")))["status"] == 200
    again = await (await replay(stand)).chat(user("hi"))
    assert again["choices"][0]["message"]["content"] == "whole"


async def test_the_length_limit_ends_a_turn_as_it_did(serve: Serve, replay: Replay) -> None:
    stand = await serve(lambda prompt, ids: "one two three four five six", max_new_tokens=3)
    first = await stand.chat(user("hi"))
    again = await (await replay(stand)).chat(user("hi"))
    assert first["choices"][0]["finish_reason"] == "length" and reproducible(again) == reproducible(first)


async def test_an_answer_that_repeated_itself_ends_as_it_did(serve: Serve, replay: Replay) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply("again and again", end=False))
    first = await stand.chat(user("hi"))
    with stand.pool.write() as connection:
        connection.execute(update(completions).values(finish_reason="repetition"))
    replayed = await replay(stand)
    assert reproducible(await replayed.chat(user("hi"))) == reproducible(first)
    assert [row.finish_reason for row in replayed.recorded()] == ["repetition"]


@pytest.mark.parametrize(
    ("turns", "where", "expected", "got"),
    [
        (["list b.txt and more", "now"], "in messages[1] (user), 5 characters into its text", "a.txt", "b.txt"),
        (
            ["list a.txt and more", "no"],
            "in messages[3] (user), 2 characters into its text",
            "w<|im_end|>",
            "<|im_end|>",
        ),
        (
            ["list a.txt and more", "now", "again"],
            "in messages[4] (assistant), 0 characters into its text",
            "",
            "again",
        ),
    ],
)
async def test_the_first_difference_is_told(
    serve: Serve, replay: Replay, tmp_path: Path, turns: list[str], where: str, expected: str, got: str
) -> None:
    def messages(texts: list[str]) -> list[dict[str, Any]]:
        between = {"role": "assistant", "content": "ok"}
        turns = [turn for text in texts for turn in (user(text), between)]
        return [{"role": "system", "content": "You help."}, *turns[:-1]]

    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(*messages(["list a.txt and more"]))
    await stand.chat(*messages(["list a.txt and more", "now"]))
    before = [item.reply for item in stand.recorded()]
    replayed = await replay(stand)
    assert (await replayed.chat(*messages(["list a.txt and more"])))["status"] == 200
    answer = await replayed.chat(*messages(turns))
    ((line),) = report(tmp_path)
    assert answer["status"] == 400 and line["where"] == where
    assert expected in line["expected"] and got in line["got"] and line["expected"] != line["got"]
    assert where in answer["error"]["message"] and [item.reply for item in stand.recorded()] == before


async def test_a_date_in_the_prompt_is_the_recorded_one(tiny_model: Path, tmp_path: Path) -> None:
    """The recorded attempt began in the year 2001; its template writes the date."""
    dated = tmp_path / "dated"
    shutil.copytree(tiny_model, dated)
    template = msgspec.json.decode((dated / "tokenizer_config.json").read_bytes())["chat_template"]
    (dated / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}" + template)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        seen = Seen(lambda prompt, ids: "ok")
        engine = await listening(ScriptedEngine(seen, ChatTemplate(dated)).app(), stack)
        config = ProxyConfig(engine=EngineConfig(model=str(dated)), pool=str(tmp_path / "pool.db"))
        pool = open_pool(config.pool)
        open_session(pool, "agent")
        with pool.write() as connection:
            connection.execute(update(attempts).values(opened_at=1e9))
        stand = Stand(await served(Gateway(config, engine), stack), pool, http)
        await stand.chat(user("hi"))
        assert seen.prompts[0].startswith("2001")
        recording = AttemptRecording(pool, 1, ChatTemplate(dated), tmp_path / "report.jsonl")
        replayed = ReplayGateway(msgspec.structs.replace(config, pool=str(tmp_path / "replayed.db")), recording)
        assert (await Stand(await served(replayed, stack), pool, http).chat(user("hi")))["status"] == 200


async def test_other_tools_are_a_difference_before_the_messages(serve: Serve, replay: Replay, tmp_path: Path) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(user("hi"), tools=[SHELL])
    answer = await (await replay(stand)).chat(user("hi"))
    ((line),) = report(tmp_path)
    assert answer["error"]["code"] == "not_recorded" and line["where"] == "in messages[0] (user), before its text"
    assert "# Tools" in line["expected"]


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_difference_has_the_dialects_error_form(serve: Serve, replay: Replay, path: str) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    await stand.ask(path, REQUESTS[path])
    body = msgspec.json.encode(REQUESTS[path]).replace(b'"hi"', b'"ho"')
    answer = await (await replay(stand)).ask(path, body)
    assert answer["status"] == 400 and "is not in the recording of attempt 1" in answer["error"]["message"]


async def test_what_is_ignored_is_no_difference(serve: Serve, replay: Replay, tmp_path: Path) -> None:
    def messages(path: str, task: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": f"You work in {path}/work."}, user(task)]

    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(*messages("/tmp/a1", "list"))
    replayed = await replay(stand, re.compile("/tmp/[^/]+"))
    assert (await replayed.chat(*messages("/tmp/b234", "list")))["status"] == 200
    assert (await replayed.chat(*messages("/tmp/b234", "lost"), key="other"))["status"] == 400
    ((line),) = report(tmp_path)
    assert line["where"] == "in messages[1] (user), 1 characters into its text"
    assert (await replayed.chat(*messages("/var/b234", "list"), key="third"))["status"] == 400


def test_an_attempt_without_answers_is_refused(tmp_path: Path, template: ChatTemplate) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    with pytest.raises(UserError, match="has no answers of attempt 7 to play"):
        AttemptRecording(pool, 7, template, tmp_path / "report.jsonl")


async def test_the_command_serves_reports_and_leaves_the_pool_as_it_was(
    serve: Serve, tiny_model: Path, tmp_path: Path
) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    await stand.chat(user("hi"))
    before = [(item.id, item.reply) for item in stand.recorded()]
    config = tmp_path / "proxy.toml"
    config.write_text(f'pool = "pool.db"\n[engine]\nmodel = "{tiny_model}"\n')
    ready, differing = tmp_path / "ready", tmp_path / "differences.jsonl"
    words = ["replay", str(config), "1", "--ready-file", str(ready), "--report", str(differing)]
    command = [sys.executable, "-m", "proxy", *words]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
    wait_until(lambda: ready.exists() or started.poll() is not None)
    replayed = Stand(msgspec.json.decode(ready.read_bytes())["url"], stand.pool, stand.http)
    async with stand.http.get(f"{replayed.url}/health") as answer:
        health = await answer.json()
    assert health["engine"] == {"url": "attempt 1", "ok": True} and health["pool"] != str(stand.pool.url)
    assert [(await replayed.chat(user(text)))["status"] for text in ("hi", "ho")] == [200, 400]
    started.terminate()
    output, _ = started.communicate(timeout=60)
    assert started.returncode == 1
    assert "attempt 1: 1 of 1 answers played, 1 requests differed" in output and str(differing) in output
    assert [(item.id, item.reply) for item in stand.recorded()] == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["x"], "is not the number of an attempt"),
        (["1"], "holds no pool"),
        (["1", "--ignore", "a("], "is not a regular expression"),
    ],
)
def test_what_cannot_be_played(
    words: list[str], sentence: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "proxy.toml"
    config.write_text(f'[engine]\nmodel = "{tiny_model}"\n')
    assert main(["replay", str(config), *words]) == 2
    assert sentence in capsys.readouterr().err
