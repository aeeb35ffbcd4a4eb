"""Retries: an answer that did not arrive is served again, once; every other request is sampled."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import aiohttp
import msgspec
import pytest
from sqlalchemy import Table, select, update

from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.scripted import Fault, ScriptedEngine, ScriptedReply
from proxy.http.limits import LIMITS, RequestLimits
from proxy.pool.database import Pool, locked, open_pool
from proxy.pool.processes.deliveries import UndeliveredAnswer, register_proxy, undelivered_of
from proxy.pool.processes.owners import this_process
from proxy.pool.rollouts.attempts import Ending, by_key, close_attempt
from proxy.pool.schema import attempts, completions, proxies
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.prompt.template import ChatTemplate
from proxy.recording.redelivery.ledger import DeliveryLedger
from proxy.recording.redelivery.service import Redelivery
from proxy.recording.redelivery.waiting import WaitingAnswers
from proxy.server import Gateway
from tests.proxy.conftest import SHELL, Stand, listening, shell_call, user
from tests.proxy.dialect_clients import DIALECT_CLIENTS, DialectClient

ABANDONED = Untrained(UntrainedReason.ABANDONED)
Start = Callable[[], Awaitable[Stand]]
ONCE_MORE = user("once more")


@pytest.fixture
def limits() -> RequestLimits:
    return LIMITS


@pytest.fixture
async def start(tiny_model: Path, database: str, limits: RequestLimits) -> AsyncIterator[Start]:
    """Starts a gateway on the test's database; all of a test share one engine, whose answers are numbered."""
    async with AsyncExitStack() as stack:
        numbers = count()
        engine = ScriptedEngine(lambda prompt, ids: f"answer {next(numbers)}", ChatTemplate(tiny_model))
        url = await listening(engine.app(), stack)
        http = await stack.enter_async_context(aiohttp.ClientSession())

        async def gateway() -> Stand:
            config = ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=database)
            served = Gateway(config, url, limits=limits)
            return Stand(await listening(served.app(), stack), open_pool(database), http, engine)

        yield gateway


def no_commits(pool: Pool) -> AbstractContextManager[None]:
    """While the block lasts, completions of open attempts cannot be committed."""
    return held(pool, attempts)


@contextmanager
def held(pool: Pool, table: Table) -> Iterator[None]:
    """While the block lasts, no row of the table changes; on SQLite, no row of any table."""
    is_locked, over = Event(), Event()

    def hold() -> None:
        with pool.write() as connection:
            locked(connection, select(table.c.id).order_by(table.c.id))
            is_locked.set()
            over.wait(60)

    with ThreadPoolExecutor(1) as thread:
        holding = thread.submit(hold)
        assert is_locked.wait(60)
        try:
            yield
        finally:
            over.set()
            holding.result()


async def until_at_commit(stand: Stand) -> None:
    """Wait until one answer is complete and its row waits for the commit."""
    while "blackforge_uncommitted_completions 1.0\n" not in await metrics(stand):
        await asyncio.sleep(0.01)


async def until_abandoned(stand: Stand, calls: int) -> None:
    while f"blackforge_abandoned_calls_total {calls:.1f}\n" not in await metrics(stand):
        await asyncio.sleep(0.01)


async def metrics(stand: Stand) -> str:
    async with stand.http.get(f"{stand.url}/metrics") as answer:
        return str(await answer.text())


async def ask(stand: Stand, dialect: DialectClient, stream: bool, text: str = "once more") -> str:
    path, body = dialect.request(text, stream)
    async with stand.send(path, body) as answer:
        data = await answer.read()
    assert answer.status == 200, data
    return dialect.text_of(data, stream)


async def lose(stand: Stand, call: Awaitable[Any]) -> None:
    """Make a call whose client goes away while the row is being committed."""
    running = asyncio.ensure_future(call)
    await until_at_commit(stand)
    running.cancel()
    await asyncio.wait([running])
    await until_abandoned(stand, 1)


async def with_a_lost_call(start: Start) -> Stand:
    """A stand whose second answer, which has text and a call, did not arrive."""
    stand = await start()
    assert stand.engine is not None
    stand.engine.script = lambda prompt, ids: ScriptedReply(f"I look at the files now.\n{shell_call('ls')}")
    await stand.chat(user("first"), tools=[SHELL])
    with no_commits(stand.pool):
        await lose(stand, stand.chat(ONCE_MORE, tools=[SHELL]))
    return stand


async def until_settled(stand: Stand, reason: Untrained | None, index: int) -> None:
    """Wait until a completion is untrainable for this reason, or trainable."""
    while len(stand.recorded()) <= index or stand.recorded()[index].untrainable != reason:
        await asyncio.sleep(0.01)


@pytest.fixture
async def stand(start: Start) -> Stand:
    """A gateway whose session has one delivered answer, number 0."""
    stand = await start()
    await stand.chat(user("first"))
    return stand


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("again", [True, False], ids=["streamed again", "whole again"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("dialect", DIALECT_CLIENTS, ids=[dialect.name for dialect in DIALECT_CLIENTS])
async def test_an_answer_that_did_not_arrive_is_served_again(
    stand: Stand, dialect: DialectClient, stream: bool, again: bool
) -> None:
    with no_commits(stand.pool):
        await lose(stand, ask(stand, dialect, stream))
    await until_settled(stand, ABANDONED, 1)
    assert await ask(stand, dialect, again) == "answer 1"
    await until_settled(stand, None, 1)
    assert stand.engine is not None and stand.engine.calls == 2
    assert await ask(stand, dialect, again) == "answer 2"  # it has arrived by now: a new sample


async def test_a_repeat_that_comes_before_the_commit_waits_for_it(stand: Stand) -> None:
    with no_commits(stand.pool):
        await lose(stand, stand.chat(ONCE_MORE))
        repeat = asyncio.ensure_future(stand.chat(ONCE_MORE))
        await metrics(stand)
    assert content(await repeat) == "answer 1"
    await until_settled(stand, None, 1)
    assert len(stand.recorded()) == 2


async def test_an_answer_that_nobody_asks_for_again_is_not_trained(stand: Stand) -> None:
    with no_commits(stand.pool):
        await lose(stand, stand.chat(ONCE_MORE))
    await until_settled(stand, ABANDONED, 1)
    await stand.chat(user("something else"))
    first, lost, other = stand.recorded()
    assert (first.untrainable, lost.untrainable, other.untrainable) == (None, ABANDONED, None)
    assert lost.finish_reason == "stop" and len(lost.logprobs) == len(lost.sampled)


async def test_one_of_two_repeats_at_two_proxies_gets_the_answer_and_the_other_a_sample(start: Start) -> None:
    here, there = await start(), await start()
    await here.chat(user("first"))
    with no_commits(here.pool):
        await lose(here, here.chat(ONCE_MORE))
    await until_settled(here, ABANDONED, 1)
    repeats = await asyncio.gather(here.chat(ONCE_MORE), there.chat(ONCE_MORE), there.chat(ONCE_MORE))
    assert sorted(map(content, repeats)) == ["answer 1", "answer 2", "answer 3"]
    await until_settled(here, None, 1)
    assert [item.untrainable for item in here.recorded()] == [None] * 4


async def test_a_claim_whose_client_goes_away_is_given_back(stand: Stand) -> None:
    with no_commits(stand.pool):
        await lose(stand, stand.chat(ONCE_MORE))
    await until_settled(stand, ABANDONED, 1)
    waiting = WaitingAnswers()
    waiting.add(undelivered_of(stand.pool, stand.recorded()[1].attempt_id))
    [(completion_id, answer)] = waiting.by_id.items()
    with ThreadPoolExecutor(1) as threads:
        redelivery = Redelivery(stand.pool, DeliveryLedger(register_proxy(stand.pool)), threads)
        with no_commits(stand.pool):
            claiming = asyncio.ensure_future(redelivery.claim(waiting, answer.fingerprint, 4000, None))
            while waiting.by_id:
                await asyncio.sleep(0)
            claiming.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([claiming])
        assert claiming.cancelled() and list(waiting.by_id) == [completion_id]
        again = await redelivery.claim(waiting, answer.fingerprint, 4000, None)
        assert again is not None and again.recorded.id == completion_id
        assert undelivered_of(stand.pool, again.recorded.attempt_id) == []
        await again.abandon()
    assert undelivered_of(stand.pool, again.recorded.attempt_id) == [answer]


async def test_two_live_requests_that_are_the_same_are_two_samples(stand: Stand) -> None:
    answers = await asyncio.gather(stand.chat(ONCE_MORE), stand.chat(ONCE_MORE))
    assert sorted(map(content, answers)) == ["answer 1", "answer 2"]
    assert [item.untrainable for item in stand.recorded()] == [None] * 3


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({}, "answer 1"),
        ({"model": "another name", "max_tokens": 3999}, "answer 1"),
        ({"max_tokens": 1}, "ans"),
        ({"stop": ["x"]}, "answer 2"),
        ({"temperature": 0.5}, "answer 2"),
        ({"tools": [SHELL]}, "answer 2"),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_what_decides_the_answer_makes_another_request(stand: Stand, fields: dict[str, Any], answer: str) -> None:
    with no_commits(stand.pool):
        await lose(stand, stand.chat(ONCE_MORE))
    await until_settled(stand, ABANDONED, 1)
    assert content(await stand.chat(ONCE_MORE, **fields)) == answer


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_the_same_last_words_after_another_history_make_another_request(stand: Stand) -> None:
    await stand.chat(user("second"))
    with no_commits(stand.pool):
        await lose(stand, stand.chat(user("first"), {"role": "assistant", "content": "answer 0"}, user("go on")))
    await until_settled(stand, ABANDONED, 2)
    other = await stand.chat(user("second"), {"role": "assistant", "content": "answer 1"}, user("go on"))
    same = await stand.chat(user("first"), {"role": "assistant", "content": "answer 0"}, user("go on"))
    assert (content(other), content(same)) == ("answer 3", "answer 2")


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_tool_call_is_served_again_with_its_own_id(start: Start) -> None:
    stand = await with_a_lost_call(start)
    message = (await stand.chat(ONCE_MORE, tools=[SHELL]))["choices"][0]["message"]
    await until_settled(stand, None, 1)
    assert message == stand.recorded()[1].reply and stand.engine is not None and stand.engine.calls == 2
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "file"}
    await stand.chat(ONCE_MORE, message, result, tools=[SHELL])
    assert stand.recorded()[2].follows == stand.recorded()[1].id


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("got", "mark"), [("text", ABANDONED), ("call", None)])
async def test_a_request_with_a_part_of_an_answer_does_not_prove_that_it_arrived(
    start: Start, got: str, mark: Untrained | None
) -> None:
    """An agent that has lost its connection may go on with the text that it has, and never had the call behind it."""
    stand = await with_a_lost_call(start)
    await until_settled(stand, ABANDONED, 1)
    message = stand.recorded()[1].reply | {"content": "I look at the files"}  # changed, so it is no exact repeat
    kept = message if got == "call" else {"role": "assistant", "content": message["content"]}
    result = [{"role": "tool", "tool_call_id": kept["tool_calls"][0]["id"], "content": "file"}] if got == "call" else []
    await stand.chat(ONCE_MORE, kept, *result, user("go on"), tools=[SHELL])
    assert [item.untrainable for item in stand.recorded()] == [None, mark, None]
    assert stand.recorded()[2].follows == stand.recorded()[1].id


@pytest.mark.parametrize("database", ["postgres"], indirect=True)  # which locks rows
async def test_all_answers_have_arrived_that_a_client_got_before_it_left(stand: Stand) -> None:
    with no_commits(stand.pool):
        await lose(stand, stand.chat(ONCE_MORE, n=2))
    for index in (1, 2):
        await until_settled(stand, ABANDONED, index)
    with held(stand.pool, completions):  # so that the claims are committed, and what becomes of them waits
        async with aiohttp.ClientSession() as http:
            answer = await replace(stand, http=http).chat(ONCE_MORE, n=2)
        for _ in range(3):
            await metrics(stand)
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"answer 1", "answer 2"}
    async with asyncio.timeout(60):
        for index in (1, 2):
            await until_settled(stand, None, index)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize("limits", [RequestLimits(linger_seconds=0)])
async def test_a_call_that_was_aborted_is_sampled_again(start: Start) -> None:
    stand = await start()
    assert stand.engine is not None
    stand.engine.script = lambda prompt, ids: Fault(text="one two three", after=1, hang=True)
    running = asyncio.ensure_future(stand.stream(ONCE_MORE))
    while not stand.engine.calls:
        await asyncio.sleep(0.01)
    running.cancel()
    await until_settled(stand, ABANDONED, 0)
    stand.engine.script = lambda prompt, ids: "whole"
    assert content(await stand.chat(ONCE_MORE)) == "whole"
    assert [item.untrainable for item in stand.recorded()] == [ABANDONED, None]
    assert [item.finish_reason for item in stand.recorded()] == ["abort", "stop"]


async def test_what_a_killed_proxy_had_not_confirmed_is_served_again_by_the_next(stand: Stand, start: Start) -> None:
    await stand.chat(ONCE_MORE)
    kill_on_paper(stand.pool)
    after = await start()
    await until_settled(after, ABANDONED, 1)
    assert content(await after.chat(ONCE_MORE)) == "answer 1"
    await until_settled(after, None, 1)


async def test_what_a_later_request_follows_has_evidently_arrived(stand: Stand, start: Start) -> None:
    kill_on_paper(stand.pool)
    after = await start()
    await until_settled(after, ABANDONED, 0)
    await after.chat(user("first"), {"role": "assistant", "content": "answer 0"}, user("go on"))
    await until_settled(after, None, 0)


async def test_the_marks_of_an_attempt_that_has_ended_stay(stand: Stand, start: Start) -> None:
    attempt = by_key(stand.pool, "agent")
    assert attempt is not None
    close_attempt(stand.pool, attempt.id, Ending())
    kill_on_paper(stand.pool)
    await start()
    assert [item.untrainable for item in stand.recorded()] == [None]


def kill_on_paper(pool: Pool) -> None:
    """Make the pool look as if every proxy was killed before it confirmed anything."""
    me = this_process()
    dead = msgspec.structs.replace(me, started="0")
    with pool.write() as connection:
        connection.execute(update(proxies).values(owner=msgspec.to_builtins(dead), confirmed=0, on_the_way=[]))


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


async def test_two_answers_to_a_repeat_that_others_have_claimed_are_sampled(pool: Pool) -> None:
    """Each looks at both recorded ones, and finds that the other has taken one of them."""
    waiting = WaitingAnswers()
    waiting.add([UndeliveredAnswer(number, b"request", 3, False) for number in (1, 2)])
    with ThreadPoolExecutor(1) as threads:
        redelivery = Redelivery(pool, DeliveryLedger(1), threads)
        claims = [redelivery.claim(waiting, b"request", 100, None) for _ in range(2)]
        assert await asyncio.gather(*claims) == [None, None] and not waiting.by_id


async def test_a_state_that_could_not_be_written_is_not_taken_for_written(pool: Pool) -> None:
    ledger, unwritable = DeliveryLedger(register_proxy(pool)), open_pool(pool.url, create=False, read_only=True)
    with ThreadPoolExecutor(1) as threads:
        assert await Redelivery(pool, ledger, threads).confirm()
        assert not await Redelivery(unwritable, ledger, threads).confirm()
    unwritable.close()
