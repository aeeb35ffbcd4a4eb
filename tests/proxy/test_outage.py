"""No engine is up for a while: calls of runs wait and go on, clocks stand still, and lost weights come back.

The engine stops listening and drops its connections, as one that is killed does.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from sqlalchemy import select

from proxy.engine import process
from proxy.engine.engine_call import EventMeta, GenerateEvent, Sampling
from proxy.engine.replicas.fleet import Fleet
from proxy.engine.replicas.outage import Outage
from proxy.engine.replicas.replica import Origin
from proxy.engine.replicas.run_needs import RunFacts
from proxy.engine.scripted import ScriptedEngine, ScriptedReply
from proxy.pool.completions.records import VersionSpan
from proxy.pool.completions.store import of_attempt
from proxy.pool.inspect.verify import verify
from proxy.pool.processes.owners import owned
from proxy.pool.rollouts.attempts import Attempt, open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import attempts as attempts_table
from proxy.pool.training import steps
from proxy.prompt.template import ChatTemplate
from tests.proxy.conftest import Serve, Stand, listening, user

TEXT = " ".join(str(number) for number in range(1000, 1040))


def rest(prompt: str, ids: Sequence[int]) -> ScriptedReply:
    """What is missing of TEXT behind the beginning that the prompt has."""
    begun = prompt.rpartition("<|im_start|>assistant\n")[2]
    assert TEXT.startswith(begun)
    return ScriptedReply(TEXT[len(begun) :], seconds_per_token=0.015)


class Engine:
    """A scripted engine at one address, which can go and come back."""

    def __init__(self, model: Path):
        self._template = ChatTemplate(model)
        self._port = process.free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._life = AsyncExitStack()
        self.served: ScriptedEngine

    async def start(self, version: str = "initial") -> None:
        self.served = ScriptedEngine(rest, self._template)
        self.served.version = version
        await listening(self.served.app(), self._life, self._port)

    async def kill(self) -> None:
        await self._life.aclose()


@pytest.fixture
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    engine = Engine(tiny_model)
    await engine.start()
    yield engine
    await engine.kill()


def attempts(stand: Stand, number: int, run: str = "a run") -> list[tuple[Attempt, str]]:
    """Attempts of a run, with their keys."""
    members = open_group(stand.pool, open_run(stand.pool, run, "train", {}).id, {"id": "task"}, number)
    return [open_attempt(stand.pool, member.rollout_id, "agent") for member in members]


async def outage(stand: Stand, attempt: Attempt | None = None) -> dict[str, Any]:
    query = f"?attempt={attempt.id}&within=1000&run={attempt.run_id}" if attempt else ""
    async with stand.http.get(f"{stand.url}/outage{query}") as answer:
        return dict(await answer.json())


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(120):
        while not await holds():
            await asyncio.sleep(0.05)


async def read(call: Any, into: bytearray) -> aiohttp.ClientResponse:
    async with call as answer:
        async for chunk in answer.content.iter_any():
            into += chunk
        return answer


async def test_calls_of_runs_outlast_an_engine_that_is_killed_in_mid_answer(serve: Serve, engine: Engine) -> None:
    """One call is streamed, one is not, and one waits for its place; their clients are kept, and nothing is lost."""
    stand = await serve(
        url=engine.url,
        max_calls=8,
        max_new_tokens=500,
        limits={"keepalive_seconds": 0.2, "wait_seconds": 6, "unattended_seconds": 600},
    )
    (streaming, key), (whole, key_of_whole), (idle, _) = attempts(stand, 3)
    body = {"model": "tiny", "messages": [user("count")]}
    stream, bodies = bytearray(), [bytearray() for _ in range(3)]
    tasks = [asyncio.create_task(read(stand.post(body | {"stream": True}, key), stream))]
    tasks += [asyncio.create_task(read(stand.post(body, key_of_whole), into)) for into in bodies]  # two at a time

    async def begun() -> bool:
        return stream.count(b"content") > 5 and engine.served.calls == 3

    await until(begun)
    await engine.kill()

    async def seen() -> bool:
        return (await outage(stand))["away"] == f"the engine at {engine.url}"

    await until(seen)
    before = stream.count(b": keep-alive")

    async def waited() -> bool:
        return (await outage(stand, whole))["seconds"] > 6  # longer than a call may wait for its place

    await until(waited)
    assert stream.count(b": keep-alive") > before and b"error" not in stream and not any(map(asyncio.Task.done, tasks))
    assert (await stand.chat(user("hi")))["status"] == 503  # of no run: nobody says how long it may wait
    await engine.start()
    # At once, as the call without a place has waited for it before the outage, too.
    engine.served.script = lambda prompt, ids: replace(rest(prompt, ids), seconds_per_token=0.0)
    answers = await asyncio.gather(*tasks)
    assert [answer.status for answer in answers] == [200] * 4
    events = [msgspec.json.decode(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == TEXT
    assert [msgspec.json.decode(body)["choices"][0]["message"]["content"] for body in bodies] == [TEXT] * 3
    assert all(body.startswith(b" ") for body in bodies)  # signs of life
    rows = of_attempt(stand.pool, streaming.id) + of_attempt(stand.pool, whole.id)
    assert [(row.untrainable, row.finish_reason, len(row.logprobs)) for row in rows] == [
        (None, "stop", len(row.sampled)) for row in rows
    ]
    assert len(rows) == 4 and verify(stand.pool).damages == []
    assert min(row.queued_seconds or 0 for row in rows) > 5  # also those whose engine died after they had begun
    assert min([(await outage(stand, attempt))["seconds"] for attempt in (streaming, whole)]) > 6
    assert (await outage(stand, idle))["seconds"] == 0 and (await outage(stand))["away"] == ""


@pytest.mark.parametrize(
    ("named", "spans"),
    [
        (["v9", "v9", "v9"], (VersionSpan("v9", 0, 3),)),
        (["v9", "v9", "v10"], ()),
        (["v9", "v10", "v9"], ()),  # a rollback
    ],
)
def test_tokens_of_a_lost_engine_are_of_the_only_version_that_it_named(
    named: list[str], spans: tuple[VersionSpan, ...]
) -> None:
    """The tokens of several versions have no span, so they are not trained (version_missing)."""
    sampling = Sampling()
    for version in named:
        sampling.extend(GenerateEvent(output_ids=[7], meta_info=EventMeta(weight_version=version)))
    assert sampling.break_off() == [7, 7, 7] and sampling.versions == spans
    sampling.extend(GenerateEvent(output_ids=[8], meta_info=EventMeta(weight_version="v11")))
    assert sampling.break_off() == [8] and sampling.versions == (*spans, VersionSpan("v11", 3, 4))


async def test_an_engine_that_was_restarted_gets_no_call_before_its_weights(serve: Serve, engine: Engine) -> None:
    """No trainer is there, so the proxy loads them. Where they cannot be loaded, the calls wait on."""
    stand = await serve(url=engine.url, max_new_tokens=500)
    run = open_run(stand.pool, "a run", "train", {})
    done = steps.Published(step=0, checkpoint="", hf_dir="/weights", metrics={})
    engine.served.version = version = steps.publish(stand.pool, run.id, done).name
    [(attempt, key)] = attempts(stand, 1)

    async def known() -> bool:
        async with stand.http.get(f"{stand.url}/health") as answer:
            return (await answer.json())["replicas"][0]["version"] == version

    await until(known)
    asking = asyncio.create_task(stand.chat(user("count"), key=key))

    async def begun() -> bool:
        return engine.served.calls == 1

    await until(begun)
    await engine.kill()
    await engine.start()
    loaded = engine.served
    assert (await asking)["choices"][0]["message"]["content"] == TEXT
    assert (loaded.version, loaded.calls) == (version, 1)
    [row] = of_attempt(stand.pool, attempt.id)
    assert row.untrainable is None and {span.version for span in row.versions} == {version}


async def test_calls_of_a_run_wait_while_no_engine_has_its_weights(serve: Serve, engine: Engine) -> None:
    """No other calls do: those of a run that has published nothing yet, and those of no run."""
    stand = await serve(url=engine.url, limits={"unattended_seconds": 600})
    engine.served.script = lambda prompt, ids: "ok"
    [(first, key_of_first)], [(attempt, key)] = attempts(stand, 1, "without weights"), attempts(stand, 1)
    assert attempt.run_id is not None and attempt.run_id != first.run_id
    done = steps.Published(step=0, checkpoint="", hf_dir="/weights", metrics={})
    version = steps.publish(stand.pool, attempt.run_id, done).name
    waiting = asyncio.create_task(stand.chat(user("hi"), key=key))

    def seen(away: str) -> Callable[[], Awaitable[bool]]:
        async def holds() -> bool:
            said = await outage(stand, attempt)
            return bool(said["away"] == away and said["seconds"])

        return holds

    foreign = "every engine with weights of the run ({} serves {} until a trainer pushes to it)"
    await until(seen(foreign.format(engine.url, "initial")))
    assert [(await stand.chat(user("hi"), key=key))["status"] for key in (key_of_first, "of no run")] == [200, 200]
    assert (await outage(stand, first))["away"] == ""
    engine.served.version = f"{version}-loading"  # a push is under way, which is no outage
    await until(seen(""))
    engine.served.version = "v99"  # of another run, or taken back
    await until(seen(foreign.format(engine.url, "v99")))
    assert not waiting.done() and engine.served.calls == 2
    engine.served.version = version
    assert (await waiting)["status"] == 200
    [row] = of_attempt(stand.pool, attempt.id)
    assert {span.version for span in row.versions} == {version}


async def test_a_call_waits_for_an_engine_only_while_a_harness_works_at_its_run(
    serve: Serve, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.engine.replicas.fleet.CHECK_SECONDS", 0.2)
    stand = await serve(url=engine.url, limits={"unattended_seconds": 3})  # far above how often it looks
    [(_, key)], [(attempt, key_of_attended)] = attempts(stand, 1, "left"), attempts(stand, 1)
    with owned(stand.pool, open_run(stand.pool, "a run", "train", {})):
        await engine.kill()
        waiting = asyncio.create_task(stand.chat(user("count"), key=key_of_attended))
        began = time.time()
        left = await stand.chat(user("count"), key=key)
        assert (left["status"], left["error"]["code"]) == (503, "engine_unreachable")
        assert "is away, and no harness works at the run any more" in left["error"]["message"]
        assert not waiting.done() and (await outage(stand, attempt))["seconds"] > 1
    assert (await waiting)["status"] == 503
    with stand.pool.read() as connection:  # so that waiting is no work of the agent's (trainer/credit/critical_path.py)
        spans = connection.scalars(select(attempts_table.c.failed_calls).where(attempts_table.c.rollout_id == 1)).one()
    assert len(spans) == 1 and began <= spans[0][0] < spans[0][1] - 1


async def test_one_engine_of_two_that_is_away_is_no_outage() -> None:
    fleet = Fleet(["http://127.0.0.1:9", "http://127.0.0.1:19"])
    gone, there = fleet.replicas
    for replica in fleet.replicas:
        replica.circuit.failed("died")
    gone.away = "the engine at http://127.0.0.1:9"
    fleet.note_outage()
    assert fleet.away() == "" and fleet.outage_of(None).up
    homes = {fleet.pick(Origin(attempt, None, 0), 100, set()).replica.url for attempt in range(8)}
    assert homes == {there.url}
    there.away = "the engine at http://127.0.0.1:19, restarted without the weights v1,"
    fleet.note_outage()
    assert fleet.away() == "every engine (http://127.0.0.1:9, http://127.0.0.1:19)" and not fleet.outage_of(None).up
    await fleet.close()


async def test_a_push_that_ends_while_the_pool_is_asked_leaves_calls_an_engine() -> None:
    loop, asked, noted = asyncio.get_running_loop(), list[frozenset[str]](), threading.Event()

    def push() -> None:
        fleet.replicas[0].serves("v2")
        noted.set()

    def of_run(run_id: int, versions: frozenset[str]) -> RunFacts:
        asked.append(versions)
        newest = max(versions)
        if len(asked) == 1:
            loop.call_soon_threadsafe(push)
            noted.wait()
        return RunFacts(newest, versions)

    fleet = Fleet(["http://127.0.0.1:9"], of_run=of_run)
    fleet._watching[0].cancel()
    fleet.replicas[0].version = "v1"
    await fleet.until_served(1)
    assert fleet.pick(Origin(1, None, 0, 1), 100, set()).replica is fleet.replicas[0]
    assert asked == [{"v1"}, {"v2"}]
    await fleet.close()


async def test_watches_that_forget_a_run_at_the_same_time_go_on() -> None:
    def asked(run_id: int, versions: frozenset[str]) -> RunFacts:
        time.sleep(0.05)  # the second watch waits for the answer to the first
        return RunFacts(attended=False)

    fleet = Fleet(["http://127.0.0.1:9", "http://127.0.0.1:19"], of_run=asked, unattended_seconds=0)
    for run_id in range(3):
        fleet.outage_of(run_id)
    await asyncio.gather(*(fleet._look_up_runs() for _ in range(4)))
    assert not fleet._runs
    await fleet.close()


async def test_an_engine_of_one_run_comes_back_beside_one_of_another_run(
    serve: Serve, engine: Engine, tiny_model: Path
) -> None:
    """The other run has published last, so the engine has neither the newest version nor one that is served."""
    other = Engine(tiny_model)
    await other.start()
    stand = await serve(url=(engine.url, other.url), max_new_tokens=500, limits={"unattended_seconds": 600})
    runs = [open_run(stand.pool, name, "train", {}) for name in ("a run", "another")]
    done = steps.Published(step=0, checkpoint="", hf_dir="/weights", metrics={})
    mine, theirs = [steps.publish(stand.pool, run.id, done).name for run in runs]
    engine.served.version, other.served.version = mine, theirs
    [(_, key)] = attempts(stand, 1)
    assert (await stand.chat(user("count"), key=key))["status"] == 200
    await engine.kill()
    asking = asyncio.create_task(stand.chat(user("count"), key=key))

    async def gone() -> bool:
        return engine.url in await states(stand, "open")

    await until(gone)
    await engine.start(mine)
    assert (await asking)["status"] == 200
    await other.kill()


async def states(stand: Stand, state: str) -> list[str]:
    """The replicas in this state."""
    async with stand.http.get(f"{stand.url}/health") as answer:
        return [each["url"] for each in (await answer.json())["replicas"] if each["state"] == state]


def test_an_attempt_waits_only_while_its_own_call_is_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    outage = Outage()
    with outage.call(1):
        now = 10
        outage.note(up=False, ready=False)
        now = 15
        with outage.call(2), outage.call(2):
            now = 17
        now = 20
        assert [outage.seconds(attempt, 1000) for attempt in (1, 2, 3)] == [10, 2, 0]
        assert [outage.seconds(1, within) for within in (0, 4, 25)] == [0, 4, 10]
        outage.note(up=True, ready=True)
        now = 30
    assert outage.seconds(1, 1000) == 10 and outage.seconds(1, 12) == 2
    assert outage.was_down(since=19) and not outage.was_down(since=20)
