"""A call goes on for a while without its client: the first repeat takes it over, and what it holds counts meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.engine_call import EngineError
from proxy.engine.scripted import Fault, ScriptedEngine, ScriptedReply
from proxy.http.limits import RequestLimits
from proxy.pool.database import open_pool
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.attempts import Ending, by_key, close_attempt
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.prompt.template import ChatTemplate
from proxy.recording.ongoing import OngoingAnswer, OngoingAnswers
from proxy.recording.recorder import TurnRecorder
from proxy.server import Gateway
from tests.proxy.conftest import Serve, Stand, listening, user
from tests.proxy.dialect_clients import DIALECT_CLIENTS, DialectClient

ABANDONED = Untrained(UntrainedReason.ABANDONED)
ASKED = user("once more")
WHOLE = "one two three four"


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not reached():
            await asyncio.sleep(0.01)


async def metrics(stand: Stand) -> str:
    async with stand.http.get(f"{stand.url}/metrics") as answer:
        return str(await answer.text())


async def until_metric(stand: Stand, line: str) -> None:
    async with asyncio.timeout(120):
        while f"blackforge_{line}\n" not in await metrics(stand):
            await asyncio.sleep(0.01)


async def leave(stand: Stand, call: Any, times: int = 1) -> None:
    """Make a call whose client goes away while the paused engine has it."""
    assert stand.engine is not None
    calls = stand.engine.calls
    stand.engine.running.clear()
    asking = asyncio.ensure_future(call)
    if times == 1:
        await until(lambda: stand.engine is not None and stand.engine.calls > calls)
    else:  # it is to take over a call that the engine has
        await until_metric(stand, f"answers_served_again_total {times - 1:.1f}")
    asking.cancel()
    await asyncio.wait([asking])
    await until_metric(stand, f"abandoned_calls_total {times:.1f}")


async def ask(stand: Stand, dialect: DialectClient, stream: bool) -> str:
    path, body = dialect.request("once more", stream)
    async with stand.send(path, body) as answer:
        data = await answer.read()
    assert answer.status == 200, data
    return dialect.text_of(data, stream)


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture
async def stand(serve: Serve) -> Stand:
    """A gateway with a scripted engine, whose answers are numbered."""
    numbers = count()
    return await serve(lambda prompt, ids: f"answer {next(numbers)}")


def repeated(stand: Stand) -> "asyncio.Task[dict[str, Any]]":
    return asyncio.create_task(stand.chat(ASKED))


@pytest.mark.parametrize("again", [True, False], ids=["streamed again", "whole again"])
@pytest.mark.parametrize("dialect", DIALECT_CLIENTS, ids=[dialect.name for dialect in DIALECT_CLIENTS])
async def test_a_repeat_takes_over_what_is_still_sampled(serve: Serve, dialect: DialectClient, again: bool) -> None:
    """The first client has read a part of its stream, and the second one gets that, too."""
    stand = await serve(lambda prompt, ids: ScriptedReply(WHOLE, seconds_per_token=0.02))
    engine, got = stand.engine, bytearray()
    assert engine is not None
    reading = asyncio.create_task(read(stand, dialect, got))
    await until(lambda: bool(dialect.text_of(bytes(got), True)))
    engine.running.clear()
    reading.cancel()
    await until_metric(stand, "abandoned_calls_total 1.0")
    repeat = asyncio.create_task(ask(stand, dialect, again))
    await until_metric(stand, "answers_served_again_total 1.0")
    engine.running.set()
    assert await repeat == WHOLE
    assert engine.calls == 1 and engine.aborted == 0
    [row] = stand.recorded()
    assert row.untrainable is None and len(row.logprobs) == len(row.sampled)
    assert verify(stand.pool).damages == []


async def read(stand: Stand, dialect: DialectClient, into: bytearray) -> None:
    path, body = dialect.request("once more", True)
    async with stand.send(path, body) as answer:
        async for chunk in answer.content.iter_any():
            into += chunk[: chunk.rfind(b"\n\n") + 2]


async def test_of_two_repeats_the_first_takes_the_call_over_and_the_other_samples(stand: Stand) -> None:
    assert stand.engine is not None
    await leave(stand, stand.chat(ASKED))
    repeats = [repeated(stand), repeated(stand)]
    await until(lambda: stand.engine is not None and stand.engine.calls == 2)
    stand.engine.running.set()
    assert sorted([content(await repeat) for repeat in repeats]) == ["answer 0", "answer 1"]
    assert [row.untrainable for row in stand.recorded()] == [None, None] and stand.engine.calls == 2
    assert content(await stand.chat(ASKED)) == "answer 2"  # both have arrived: a new sample


async def test_a_call_is_taken_over_as_often_as_its_client_goes(stand: Stand) -> None:
    assert stand.engine is not None
    for times in (1, 2, 3):
        await leave(stand, stand.chat(ASKED), times)
    repeat = repeated(stand)
    await until_metric(stand, "answers_served_again_total 3.0")
    stand.engine.running.set()
    assert content(await repeat) == "answer 0"
    assert [row.untrainable for row in stand.recorded()] == [None] and stand.engine.calls == 1


async def test_an_answer_that_becomes_whole_without_a_client_waits_for_a_repeat(stand: Stand) -> None:
    assert stand.engine is not None
    await leave(stand, stand.chat(ASKED))
    stand.engine.running.set()
    await until(lambda: [row.untrainable for row in stand.recorded()] == [ABANDONED])
    assert stand.recorded()[0].finish_reason == "stop"
    assert content(await stand.chat(ASKED)) == "answer 0"
    await until(lambda: [row.untrainable for row in stand.recorded()] == [None])
    assert stand.engine.calls == 1


async def test_another_length_limit_makes_another_request(stand: Stand) -> None:
    assert stand.engine is not None
    await leave(stand, stand.chat(ASKED, max_tokens=100))
    repeat = asyncio.create_task(stand.chat(ASKED, max_tokens=200))
    await until(lambda: stand.engine is not None and stand.engine.calls == 2)
    stand.engine.running.set()
    assert content(await repeat) == "answer 1"


async def test_several_answers_to_one_request_are_taken_over(stand: Stand) -> None:
    assert stand.engine is not None
    stand.engine.running.clear()
    asking = asyncio.create_task(stand.chat(ASKED, n=2))
    await until(lambda: stand.engine is not None and stand.engine.calls == 2)
    asking.cancel()
    await until_metric(stand, "abandoned_calls_total 1.0")
    repeat = asyncio.create_task(stand.chat(ASKED, n=2))
    await until_metric(stand, "answers_served_again_total 2.0")
    stand.engine.running.set()
    assert {choice["message"]["content"] for choice in (await repeat)["choices"]} == {"answer 0", "answer 1"}
    assert [row.untrainable for row in stand.recorded()] == [None, None] and stand.engine.calls == 2


async def test_a_call_without_a_client_ends_with_its_attempt(stand: Stand) -> None:
    await leave(stand, stand.chat(ASKED))
    attempt = by_key(stand.pool, "agent")
    assert attempt is not None
    close_attempt(stand.pool, attempt.id, Ending())
    await until(lambda: stand.engine is not None and stand.engine.aborted == 1)
    await until_metric(stand, "uncommitted_completions 0.0")
    assert stand.recorded() == []  # nothing is added to an attempt that has ended


async def test_the_calls_of_ended_agents_are_ended_and_their_tokens_recorded(serve: Serve) -> None:
    """With a client or without; a call of another attempt goes on."""
    slow = ScriptedReply("word " * 2000, seconds_per_token=0.05)
    stand = await serve(lambda prompt, ids: slow)
    answers = [await stand.post({"messages": [user("hi")], "stream": True}, key) for key in ("left", "stays", "other")]
    for answer in answers:
        while b"word" not in await answer.content.readline():
            pass
    answers[0].close()
    await until_metric(stand, "abandoned_calls_total 1.0")
    ended = [by_key(stand.pool, key) for key in ("left", "stays")]
    ids = [attempt.id for attempt in ended if attempt is not None]
    async with stand.http.post(f"{stand.url}/end_calls", json=ids) as done:
        assert (len(ids), done.status) == (2, 204)
    for key in ("left", "stays"):
        [row] = stand.recorded(key)
        assert (row.finish_reason, row.untrainable) == ("abort", ABANDONED) and row.sampled
    assert stand.recorded("other") == [] and stand.engine is not None and stand.engine.aborted == 2
    with pytest.raises(aiohttp.ClientPayloadError):
        await answers[1].read()
    assert b"word" in await answers[2].content.readline() + await answers[2].content.readline()
    answers[2].close()
    async with stand.http.post(f"{stand.url}/end_calls", data=b'{"attempts": 1}') as refused:
        assert refused.status == 400 and "send their ids" in (await refused.json())["error"]["message"]


async def test_a_repeat_does_not_take_over_what_is_about_to_be_ended(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the order to end a call and its end, the event loop may serve a repeat."""
    left: list[tuple[OngoingAnswers, OngoingAnswer]] = []
    leave_without_client = OngoingAnswers.leave_without_client

    def leaving(all_ongoing: OngoingAnswers, answer: OngoingAnswer) -> None:
        left.append((all_ongoing, answer))
        leave_without_client(all_ongoing, answer)

    monkeypatch.setattr(OngoingAnswers, "leave_without_client", leaving)
    await leave(stand, stand.chat(ASKED))
    [(all_ongoing, answer)] = left
    attempt_id = answer.recorder.session.attempt.id
    ending = asyncio.create_task(all_ongoing.end([attempt_id]))
    await asyncio.sleep(0)
    assert all_ongoing.take_over(attempt_id, answer.recorder.fingerprint, answer.limit) is None
    await ending
    assert answer.task.cancelled() and [row.untrainable for row in stand.recorded()] == [ABANDONED]


async def test_a_call_without_a_client_ends_when_its_time_is_up(serve: Serve) -> None:
    slow = ScriptedReply("word " * 2000, seconds_per_token=0.05)
    stand = await serve(lambda prompt, ids: slow, limits={"linger_seconds": 0.3})
    async with stand.post({"messages": [ASKED], "stream": True}) as answer:
        await answer.content.readany()
    await until(lambda: bool(stand.recorded()))
    [row] = stand.recorded()
    assert (row.finish_reason, row.untrainable) == ("abort", ABANDONED) and row.sampled
    assert stand.engine is not None and stand.engine.aborted == 1


async def test_beyond_their_number_the_oldest_call_without_a_client_ends(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "fine", limits={"lingering_calls": 2})
    assert stand.engine is not None
    stand.engine.running.clear()
    for number in range(3):
        asking = asyncio.create_task(stand.chat(user(f"question {number}")))
        await until(lambda calls=number + 1: stand.engine is not None and stand.engine.calls == calls)  # type: ignore[misc]
        asking.cancel()
        await until_metric(stand, f"abandoned_calls_total {number + 1:.1f}")
    await until(lambda: stand.engine is not None and stand.engine.aborted == 1)
    stand.engine.running.set()
    await until(lambda: sorted(row.finish_reason for row in stand.recorded()) == ["abort", "stop", "stop"])
    for number, calls in ((2, 3), (1, 3), (0, 4)):
        assert (await stand.chat(user(f"question {number}")))["status"] == 200 and stand.engine.calls == calls


async def test_a_call_without_a_client_keeps_its_place_and_its_bytes(serve: Serve) -> None:
    limits = {"attempt_body_bytes": 3000, "wait_seconds": 0.2}
    stand = await serve(lambda prompt, ids: "fine", max_calls=2, limits=limits)
    assert stand.engine is not None
    padding = {"user": "x" * 2000}
    await leave(stand, stand.chat(ASKED, **padding))
    await until_metric(stand, 'calls_in_flight{run="session 1"} 1.0')
    assert (await stand.chat(user("another"), **padding))["error"]["code"] == "too_many_bytes"
    assert (await stand.chat(user("another")))["error"]["code"] == "rate_limit_exceeded"
    stand.engine.running.set()
    # The mark comes when the call is over; the row a moment before, when its bytes still count.
    await until(lambda: [(row.finish_reason, row.untrainable) for row in stand.recorded()] == [("stop", ABANDONED)])
    assert (await stand.chat(user("another"), **padding))["status"] == 200


async def test_an_engine_that_fails_a_call_without_a_client_leaves_its_row(serve: Serve) -> None:
    answers = iter([Fault(text=WHOLE, after=2), "fine"])
    stand = await serve(lambda prompt, ids: next(answers))
    assert stand.engine is not None
    await leave(stand, stand.chat(ASKED))
    stand.engine.running.set()
    await until(lambda: bool(stand.recorded()))
    [row] = stand.recorded()
    assert row.finish_reason == "error" and str(row.untrainable).startswith("engine_failed: died")
    assert content(await stand.chat(ASKED)) == "fine"


async def test_a_repeat_gets_nothing_of_the_replica_that_failed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the call over while the tokens of the first replica are stored."""
    answers = iter([Fault(text=WHOLE, after=2), "fine"])
    stand = await serve(lambda prompt, ids: next(answers), replicas=2)
    storing, go_on, store_partial = asyncio.Event(), asyncio.Event(), TurnRecorder.store_partial

    async def slowly(recorder: TurnRecorder, error: EngineError) -> None:
        storing.set()
        await go_on.wait()
        await store_partial(recorder, error)

    monkeypatch.setattr(TurnRecorder, "store_partial", slowly)
    for replica in stand.replicas:
        replica.running.clear()
    asking = asyncio.create_task(ask(stand, DIALECT_CLIENTS[0], True))
    await until(lambda: sum(replica.calls for replica in stand.replicas) == 1)
    asking.cancel()
    await until_metric(stand, "abandoned_calls_total 1.0")
    for replica in stand.replicas:
        replica.running.set()
    await storing.wait()
    repeat = asyncio.create_task(ask(stand, DIALECT_CLIENTS[0], True))
    await until_metric(stand, "answers_served_again_total 1.0")
    go_on.set()
    assert await repeat == "fine"
    assert [row.finish_reason for row in stand.recorded()] == ["error", "stop"]


@pytest.fixture
async def stopped(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Stand]:
    """A gateway that was stopped while an answer went on without a client."""
    config = ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=str(tmp_path / "pool.db"))
    slow = ScriptedReply("word " * 2000, seconds_per_token=0.05)
    async with AsyncExitStack() as around:
        engine = ScriptedEngine(lambda prompt, ids: slow, ChatTemplate(tiny_model))
        url = await listening(engine.app(), around)
        http = await around.enter_async_context(aiohttp.ClientSession())
        async with AsyncExitStack() as inside:
            gateway = Gateway(config, url, limits=RequestLimits())
            stand = Stand(await listening(gateway.app(), inside), open_pool(config.pool), http, engine)
            async with stand.post({"messages": [ASKED], "stream": True}) as answer:
                await answer.content.readany()
            await until_metric(stand, "abandoned_calls_total 1.0")
        yield stand


async def test_a_proxy_that_stops_keeps_what_was_sampled_without_a_client(stopped: Stand) -> None:
    [row] = stopped.recorded()
    assert (row.finish_reason, row.untrainable) == ("abort", ABANDONED) and row.sampled


# ---- signs of life before a whole answer


@pytest.mark.parametrize("dialect", DIALECT_CLIENTS, ids=[dialect.name for dialect in DIALECT_CLIENTS])
async def test_white_space_keeps_a_whole_answer_alive(serve: Serve, dialect: DialectClient) -> None:
    stand = await serve(lambda prompt, ids: WHOLE, limits={"keepalive_seconds": 0.02})
    assert stand.engine is not None
    stand.engine.running.clear()
    path, body = dialect.request("once more", False)
    async with stand.send(path, body) as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        assert await answer.content.readexactly(5) == b"     "
        stand.engine.running.set()
        data = await answer.read()
    assert dialect.text_of(data, False) == WHOLE and not data.strip().count(b"\n")
    assert [row.untrainable for row in stand.recorded()] == [None]
    name = {"chat": "chat_completions"}.get(dialect.name, dialect.name)
    await until_metric(stand, f'calls_answered_total{{dialect="{name}"}} 1.0')


async def test_an_error_after_the_white_space_breaks_the_connection(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: Fault(text=WHOLE, after=2), limits={"keepalive_seconds": 0.02})
    assert stand.engine is not None
    stand.engine.running.clear()
    async with stand.post({"messages": [ASKED]}) as answer:
        assert answer.status == 200 and await answer.content.readexactly(1) == b" "
        stand.engine.running.set()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert 'failures_total{kind="engine_died"} 1.0\n' in await metrics(stand)
    assert str(stand.recorded()[0].untrainable).startswith("engine_failed: died")


async def test_a_client_of_http_1_0_gets_its_headers_with_the_answer(serve: Serve) -> None:
    """Its body ends with the connection, so that an error in mid-body could not be told from an end."""
    stand = await serve(
        lambda prompt, ids: ScriptedReply(WHOLE, seconds_per_token=0.1), limits={"keepalive_seconds": 0.02}
    )
    body = msgspec.json.encode({"messages": [ASKED]})
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stand.url.rpartition(":")[2]))
    head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    headers, _, got = (await reader.read()).partition(b"\r\n\r\n")
    assert headers.startswith(b"HTTP/1.0 200") and got.startswith(b'{"')
    assert content(msgspec.json.decode(got)) == WHOLE
    writer.close()
