"""Gateways on one pool, on SQLite and on PostgreSQL: several at a time, one after another, and a pool that is gone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.scripted import ScriptedEngine
from proxy.pool.database import open_pool
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.attempts import Ending, by_key, close_attempt, open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from tests.pool.make import TASK
from tests.postgres import Server
from tests.proxy.conftest import Stand, listening, served, user

Start = Callable[[str], Awaitable[Stand]]


@pytest.fixture
async def start(tiny_model: Path) -> AsyncIterator[Start]:
    """Starts a gateway on the pool of this URL; all of a test share one scripted engine."""
    async with AsyncExitStack() as stack:
        engine = await listening(ScriptedEngine(lambda prompt, ids: "ok", ChatTemplate(tiny_model)).app(), stack)
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def gateway(url: str) -> Stand:
            proxy = Gateway(ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=url), engine)
            return Stand(await served(proxy, stack), open_pool(url), http)

        yield gateway


async def test_two_gateways_record_one_attempt_without_a_clash(start: Start, database: str) -> None:
    stands = [await start(database), await start(database)]
    turns = [user("hi"), {"role": "assistant", "content": "ok"}, user("more")]
    for messages in (turns[:1], turns):
        calls = (stands[number % 2].chat(*messages) for number in range(10))
        assert {answer["status"] for answer in await asyncio.gather(*calls)} == {200}
    assert [item.ordinal for item in stands[0].recorded()] == list(range(20))
    report = verify(stands[0].pool)
    assert (report.attempts, report.completions, report.damages) == (1, 20, [])


async def test_an_attempt_that_goes_on_at_another_gateway_keeps_its_tokens(start: Start, database: str) -> None:
    first, second = await start(database), await start(database)
    await first.chat(user("hi"))
    await second.chat(user("hi"), {"role": "assistant", "content": "ok"}, user("more"))
    before, after = first.recorded()
    assert after.follows == before.id and after.prefix_of == before.id
    assert after.prefix_length == before.prompt_length + len(before.sampled)


async def test_attempts_at_once_that_change_gateways_at_every_turn(start: Start, database: str) -> None:
    """Eight conversations, of which each turn goes to the other gateway: each row once, each turn on the one before."""
    stands = [await start(database), await start(database)]
    pool = stands[0].pool
    opened = open_group(pool, open_run(pool, "r", "train", {}).id, TASK, 8)
    keys = [open_attempt(pool, rollout.rollout_id, "command")[1] for rollout in opened]

    async def talk(number: int) -> None:
        messages: list[dict[str, Any]] = []
        for turn in range(6):
            messages.append(user(f"attempt {number} turn {turn}"))
            answer = await stands[(number + turn) % 2].chat(*messages, key=keys[number])
            messages.append(answer["choices"][0]["message"])

    await asyncio.gather(*map(talk, range(len(keys))))
    for key in keys:
        rows = stands[0].recorded(key)
        assert [row.ordinal for row in rows] == list(range(6)) and not any(row.untrainable for row in rows)
        for before, after in pairwise(rows):
            assert after.follows == after.prefix_of == before.id
        lengths = [row.prompt_length + len(row.sampled) for row in rows]
        assert [row.prefix_length for row in rows[1:]] == lengths[:-1]
    report = verify(pool)
    assert (report.attempts, report.completions, report.trainable, report.damages) == (8, 48, 48, [])


@pytest.mark.parametrize("id", ["resp_\0", "\0", "resp_" + "0" * 31 + "\0", "resp_1", "resp_\u0660" + "0" * 31, ""])
async def test_an_id_that_no_response_can_have_is_not_known(start: Start, database: str, id: str) -> None:
    """PostgreSQL takes no NUL, not even in a comparison."""
    stand = await start(database)
    body = {"model": "tiny", "input": "go on", "previous_response_id": id or "-"}
    refused = await stand.ask("/v1/responses", body)
    assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
    reference = {"type": "item_reference", "id": id}
    refused = await stand.ask("/v1/responses", {"model": "tiny", "input": [reference]})
    assert (refused["status"], refused["error"]["code"]) == (404, "not_found")
    for method, rest in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        path = f"{stand.url}/v1/responses/{quote(id or '-')}{rest}"
        async with stand.http.request(method, path, headers={"x-api-key": "agent"}) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (404, "not_found")


async def test_a_nul_in_any_text_of_a_request_is_served_or_refused(start: Start, database: str) -> None:
    """Names, ids, texts and keys: all that might become a row's text or a statement's."""
    stand, nul = await start(database), "a\0b"
    function = {"name": nul, "description": nul, "parameters": {"type": "object", "properties": {nul: {}}}}
    call = {"id": nul, "type": "function", "function": {"name": nul, "arguments": nul}}
    messages = [user(nul), {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": nul}]
    messages[-1]["content"] = nul
    bodies: dict[str, Any] = {
        "chat/completions": {"messages": messages, "tools": [{"type": "function", "function": function}], "stop": nul},
        "completions": {"prompt": nul},
        "messages": {"messages": [user(nul)], "max_tokens": 9, "system": nul, "metadata": {"user_id": nul}},
        "responses": {
            "input": [{"role": "user", "content": nul, "id": nul}, {"type": "reasoning", "encrypted_content": nul}],
            **{"instructions": nul, "metadata": {nul: nul}, "tools": [{"type": "function", **function}]},
            **{"prompt_cache_key": nul, "user": nul, "safety_identifier": nul},
        },
    }
    for path, body in bodies.items():
        for key in ("agent", "r/%00"):
            prefix = f"/{key}" if key != "agent" else ""
            answer = await stand.ask(f"{prefix}/v1/{path}", {"model": nul, **body})
            assert answer["status"] == (401 if prefix else 200), (path, key, answer)
    assert len(stand.recorded()) == len(bodies) and verify(stand.pool).damages == []


async def test_the_key_of_a_closed_attempt_is_refused_everywhere(start: Start, database: str) -> None:
    stands = [await start(database), await start(database)]
    pool = stands[0].pool
    [rollout] = open_group(pool, open_run(pool, "r", "train", {}).id, TASK, 1)
    attempt, key = open_attempt(pool, rollout.rollout_id, "command")
    assert [(await stand.chat(user("hi"), key=key))["status"] for stand in stands] == [200, 200]
    close_attempt(pool, attempt.id, Ending())
    assert [(await stand.chat(user("hi"), key=key))["status"] for stand in stands] == [401, 401]


async def test_a_database_that_went_away_costs_its_calls_and_no_more(
    start: Start, postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.recording.sessions.RECHECK_SECONDS", 600)  # the first key is not asked for again
    stand = await start(postgres_server.database())
    name = stand.pool.url.rpartition("/")[2]
    assert (await stand.chat(user("hi")))["status"] == 200
    postgres_server.execute(f"alter database {name} allow_connections false")
    postgres_server.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")
    gone = [await stand.chat(user("hi")), await stand.chat(user("hi"), key="stranger")]
    assert [(answer["status"], answer["error"]["code"]) for answer in gone] == [
        (507, "pool_write_failed"),
        (503, "pool_unavailable"),
    ]
    assert postgres_server.password not in str(gone)
    postgres_server.execute(f"alter database {name} allow_connections true")
    assert (await stand.chat(user("hi")))["status"] == 200 and len(stand.recorded()) == 2
    assert by_key(stand.pool, "stranger") is None


async def test_health_does_not_tell_the_address_of_a_server(start: Start, database: str) -> None:
    stand = await start(database)
    async with stand.http.get(f"{stand.url}/health") as answer:
        health = await answer.json()
    assert health.get("pool") == (database if database.startswith("sqlite") else None)
