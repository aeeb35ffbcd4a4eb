"""Admission of calls and of work in threads: places are handed out in turn, up to the limits, and always given back."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import aiohttp
import msgspec
import pytest

from proxy.call import CallError
from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.scripted import ScriptedEngine
from proxy.http.admission import SMALL_TOKENS, AdmissionGate, Capacity, FairThreads, OwnShareTaken
from proxy.pool.rollouts.attempts import Attempt, open_attempt
from proxy.pool.rollouts.budgets import calls_seen
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from tests.pool.make import TASK
from tests.proxy.conftest import Serve, Stand, listening, served, user
from tests.proxy.dialect_clients import DIALECT_CLIENTS, DialectClient, body_of, events


def attempt(number: int, run: int | None) -> Attempt:
    return Attempt(number, run, None, "command", "train", True, 0.0)


class Crowd:
    """Callers at a gate: notes the order in which they enter, and lets each leave."""

    def __init__(self, gate: AdmissionGate):
        self.gate = gate
        self.entered: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._out: dict[str, asyncio.Event] = {}

    async def come(self, name: str, who: Attempt) -> None:
        self._out[name] = asyncio.Event()
        self.tasks[name] = asyncio.ensure_future(self._stay(name, who))
        await settle()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._out[name].set()
            await self.tasks[name]
        await settle()

    async def _stay(self, name: str, who: Attempt) -> None:
        async with self.gate.place(who):
            self.entered.append(name)
            await self._out[name].wait()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_runs_take_turns_and_a_flood_leaves_a_place_to_others() -> None:
    crowd = Crowd(AdmissionGate(Capacity(total=3, per_run=2, per_attempt=2)))
    for name in ("a1", "a2", "a3", "a4"):
        await crowd.come(name, attempt(1, 1))
    for name in ("b1", "b2"):
        await crowd.come(name, attempt(2, 2))
    assert crowd.entered == ["a1", "a2", "b1"]
    assert (crowd.gate.inside, crowd.gate.waiting) == ({"run 1": 2, "run 2": 1}, {"run 1": 2, "run 2": 1})
    await crowd.leave("a1")
    await crowd.leave("a2")
    assert crowd.entered[3:] == ["a3", "b2"]
    await crowd.leave("b1", "b2", "a3", "a4")
    assert crowd.entered[5:] == ["a4"]
    assert (crowd.gate.inside, crowd.gate.waiting) == ({}, {})


async def test_attempts_of_a_run_take_turns() -> None:
    crowd = Crowd(AdmissionGate(Capacity(total=2, per_run=2, per_attempt=1)))
    for name in ("a1", "a2", "a3"):
        await crowd.come(name, attempt(1, 1))
    await crowd.come("b1", attempt(2, 1))
    assert crowd.entered == ["a1", "b1"]
    await crowd.leave("a1")
    assert crowd.entered == ["a1", "b1", "a2"]
    await crowd.come("b2", attempt(2, 1))
    await crowd.leave("b1", "a2")
    assert crowd.entered[3:] == ["b2", "a3"]
    await crowd.leave("b2", "a3")


async def test_who_gives_up_leaves_no_place_taken() -> None:
    crowd = Crowd(AdmissionGate(Capacity(total=1, per_run=1, per_attempt=1)))
    for name in ("in", "waiting", "next"):
        await crowd.come(name, attempt(1, None))
    crowd.tasks["waiting"].cancel()
    crowd._out["in"].set()
    await asyncio.wait([crowd.tasks["waiting"]])
    await settle()
    assert crowd.entered == ["in", "next"] and crowd.tasks["waiting"].cancelled()
    crowd.tasks["next"].cancel()
    await asyncio.wait([crowd.tasks["next"]])
    assert (crowd.gate.inside, crowd.gate.waiting) == ({}, {})
    await crowd.come("last", attempt(1, None))
    assert crowd.entered[-1] == "last"
    await crowd.leave("last")


async def test_the_deadline_says_what_is_full() -> None:
    gate = AdmissionGate(Capacity(total=1, per_run=1, per_attempt=1))
    async with gate.place(attempt(1, 7)):
        with pytest.raises(
            CallError, match="run 7 has 1 calls in flight and 1 waiting.*0.01 s; try again in 5s"
        ) as caught:
            async with gate.place(attempt(2, 7), 0.01):
                pass
    assert caught.value.status == 429 and (gate.inside, gate.waiting) == ({}, {})


async def test_an_attempt_in_its_own_way_is_told_so() -> None:
    """Its share is full when the call is refused, also in the moment in which a place is handed out too late."""
    gate = AdmissionGate(Capacity(total=4, per_run=2, per_attempt=1))
    async with gate.place(attempt(1, 7)):
        with pytest.raises(OwnShareTaken, match="run 7 has 1 calls .*as many as one may have.*try again in 5s"):
            async with gate.place(attempt(1, 7), 0.01):
                pass
        async with gate.place(attempt(2, 7)):
            with pytest.raises(CallError) as caught:
                async with gate.place(attempt(3, 7), 0.01):
                    pass
    assert not isinstance(caught.value, OwnShareTaken) and gate.inside == {}


async def test_work_keeps_its_place_until_the_thread_is_done() -> None:
    begun, over = Event(), Event()

    def block() -> None:
        begun.set()
        over.wait(60)

    with ThreadPoolExecutor(1) as threads:
        work = FairThreads(threads, Capacity(total=1, per_run=1, per_attempt=1))
        running = asyncio.ensure_future(work.run(attempt(1, 1), block))
        await asyncio.to_thread(begun.wait, 60)
        running.cancel()
        await settle()
        assert work.gate.inside == {"run 1": 1} and not running.done()
        over.set()
        await asyncio.wait([running])
        assert running.cancelled() and work.gate.inside == {}


async def test_large_work_leaves_the_event_loop_and_small_work_stays() -> None:
    with ThreadPoolExecutor(1) as threads:
        work = FairThreads(threads, Capacity(total=1, per_run=1, per_attempt=1))
        assert await work.sized(SMALL_TOKENS, attempt(1, 1), current_thread) is main_thread()
        assert await work.sized(SMALL_TOKENS + 1, attempt(1, 1), current_thread) is not main_thread()


# ---- through a gateway


class Slow(ChatTemplate):
    """A template that blocks on texts and answers of one attempt until a test releases it."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.plain = ChatTemplate(directory)
        self.entered: Counter[str] = Counter()
        self.go_on = Event()

    def render(self, messages: Any, tools: Any, **options: Any) -> str:
        text = super().render(messages, tools, **options)
        if "slow" in text:
            self.stand_still("render")
        return text

    def decode(self, ids: Any) -> str:
        text = super().decode(ids)
        if "sluggish" in text:
            self.stand_still("decode")
        return text

    def stand_still(self, where: str) -> None:
        self.entered[where] += 1
        assert self.go_on.wait(60)


@dataclass
class SlowStand:
    """A gateway whose template can block."""

    stand: Stand
    template: Slow
    keys: list[str]
    """Keys of two attempts in each of two runs."""


@pytest.fixture
async def slow(tiny_model: Path, tmp_path: Path) -> AsyncIterator[SlowStand]:
    template = Slow(tiny_model)
    async with AsyncExitStack() as stack:
        script = ScriptedEngine(
            lambda prompt, ids: "sluggish " * SMALL_TOKENS if "long" in prompt else "ok", template.plain
        )
        config = ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=str(tmp_path / "pool.db"))
        gateway = Gateway(config, await listening(script.app(), stack))
        gateway.template = template
        http = await stack.enter_async_context(aiohttp.ClientSession())
        groups = [open_group(gateway.pool, open_run(gateway.pool, name, "train", {}).id, TASK, 2) for name in "ab"]
        keys = [open_attempt(gateway.pool, member.rollout_id, "command")[1] for group in groups for member in group]
        stand = Stand(await served(gateway, stack), gateway.pool, http, script)
        try:
            yield SlowStand(stand, template, keys)
        finally:
            template.go_on.set()


async def test_a_run_that_renders_slowly_leaves_a_thread_to_the_others(slow: SlowStand) -> None:
    first, second, other, _ = slow.keys
    calls = [asyncio.ensure_future(slow.stand.chat(user("slow"), key=key)) for key in (first, second) for _ in range(4)]
    await until(lambda: slow.template.entered["render"] == 3)
    assert (await slow.stand.chat(user("quick"), key=other))["status"] == 200
    assert slow.template.entered["render"] == 3
    slow.template.go_on.set()
    assert {(await call)["status"] for call in calls} == {200}


async def test_an_attempt_that_renders_slowly_leaves_a_thread_to_its_run(slow: SlowStand) -> None:
    first, second, *_ = slow.keys
    calls = [asyncio.ensure_future(slow.stand.chat(user("slow"), key=first)) for _ in range(4)]
    await until(lambda: slow.template.entered["render"] == 2)
    assert (await slow.stand.chat(user("quick"), key=second))["status"] == 200
    slow.template.go_on.set()
    assert {(await call)["status"] for call in calls} == {200}


async def test_a_long_answer_is_read_off_the_event_loop(slow: SlowStand) -> None:
    first, second, *_ = slow.keys
    call = asyncio.ensure_future(slow.stand.chat(user("long"), key=first))
    await until(lambda: slow.template.entered["decode"] > 0)
    assert (await slow.stand.chat(user("quick"), key=second))["status"] == 200
    slow.template.go_on.set()
    assert (await call)["status"] == 200


async def test_calls_beyond_the_limit_wait_and_are_counted_by_run(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", max_calls=2)
    assert stand.engine is not None
    stand.engine.running.clear()
    calls = [asyncio.ensure_future(stand.chat(user("hi"))) for _ in range(3)]
    await until_counted(stand, 'calls_in_flight{run="session 1"} 1.0', 'calls_waiting{run="session 1"} 2.0')
    waiting = time.monotonic()
    calls.append(asyncio.ensure_future(stand.chat(user("hi"), key="another")))
    await until_counted(stand, 'calls_in_flight{run="session 2"} 1.0')
    waited = time.monotonic() - waiting
    stand.engine.running.set()
    assert {answer["status"] for answer in await asyncio.gather(*calls)} == {200}
    at_once, *others = sorted(row.queued_seconds or 0.0 for row in stand.recorded())
    assert at_once < waited < min(others)  # no two of them held a place at the same time


@pytest.mark.parametrize("begun", [False, True], ids=["before the headers", "after them"])
async def test_a_call_that_waits_too_long_is_told_so_in_its_dialect(serve: Serve, begun: bool) -> None:
    limits = {"wait_seconds": 1, "keepalive_seconds": 0.1 if begun else 25}
    stand = await serve(lambda prompt, ids: "ok", max_calls=2, limits=limits)
    assert stand.engine is not None
    stand.engine.running.clear()
    first = asyncio.ensure_future(stand.chat(user("hi")))
    await until_counted(stand, 'calls_in_flight{run="session 1"} 1.0')
    calls = list(product(DIALECT_CLIENTS, (False, True)))
    for (dialect, stream), outcome in zip(calls, await asyncio.gather(*(ask(stand, *c) for c in calls)), strict=True):
        if begun and not stream:  # its status left with the white space, so that its connection was broken
            assert outcome == BROKEN, dialect.name
            continue
        assert (outcome.status, outcome.retry_after) == ((200, None) if begun else (429, "5")), dialect.name
        assert outcome.kind == TOO_MANY.get(dialect.name, "rate_limit_exceeded"), dialect.name
        assert "session 1 has 1 calls in flight" in outcome.message
    stand.engine.running.set()
    assert (await first)["status"] == 200 and len(stand.recorded()) == 1


async def test_a_refusal_for_the_attempts_own_calls_is_no_trouble_of_the_proxys(serve: Serve) -> None:
    """Otherwise a policy that fails could fill its share, be refused, end its agent, and get another attempt."""
    stand = await serve(lambda prompt, ids: "ok", max_calls=8, limits={"wait_seconds": 1})
    assert stand.engine is not None
    stand.engine.running.clear()
    group = open_group(stand.pool, open_run(stand.pool, "a", "train", {}).id, TASK, 3)
    greedy, other, third = (open_attempt(stand.pool, member.rollout_id, "command") for member in group)
    calls = [asyncio.ensure_future(stand.chat(user("hi"), key=greedy[1])) for _ in range(2)]
    await until_counted(stand, 'calls_in_flight{run="run 1"} 2.0')
    refused = await stand.chat(user("hi"), key=greedy[1], n=5)
    assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
    assert calls_seen(stand.pool, greedy[0].id).broken is None
    calls += [asyncio.ensure_future(stand.chat(user("hi"), key=other[1])) for _ in range(2)]
    await until_counted(stand, 'calls_in_flight{run="run 1"} 4.0')
    assert (await stand.chat(user("hi"), key=third[1]))["status"] == 429
    assert "run 1 has 4 calls" in (calls_seen(stand.pool, third[0].id).broken or "")  # others took its place
    stand.engine.running.set()
    assert {(await call)["status"] for call in calls} == {200}


TOO_MANY = {"messages": "rate_limit_error", "gemini": 429}
"""The name of the error in dialects without codes."""


@dataclass(frozen=True)
class Outcome:
    status: int
    retry_after: str | None
    kind: Any
    message: str


BROKEN = Outcome(200, None, None, "")
"""The body broke off before its JSON."""


async def ask(stand: Stand, dialect: DialectClient, stream: bool) -> Outcome:
    path, body = dialect.request("more", stream)
    async with stand.send(path, body) as answer:
        data, retry = await body_of(answer), answer.headers.get("Retry-After")
    if not data.strip():
        return BROKEN
    streamed = answer.content_type == "text/event-stream"
    return Outcome(answer.status, retry, *dialect.error(events(data)[-1] if streamed else msgspec.json.decode(data)))


async def until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0.01)


async def until_counted(stand: Stand, *lines: str) -> None:
    while True:
        async with stand.http.get(f"{stand.url}/metrics") as answer:
            text = await answer.text()
        if all(f"blackforge_{line}\n" in text for line in lines):
            return
        await asyncio.sleep(0.01)
