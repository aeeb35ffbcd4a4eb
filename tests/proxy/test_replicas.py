"""Several replicas: a lost one costs retries and no rollout, comes back by itself, and only with the current weights.

Not covered: data-parallel ranks of a real engine, replicas on other machines.
"""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from proxy.engine import process
from proxy.engine.engine_call import Sampling, SamplingRequest
from proxy.engine.replicas.circuit import FAILURES, FIRST_PAUSE, LONGEST_PAUSE, Circuit
from proxy.engine.replicas.fleet import Fleet
from proxy.engine.replicas.replica import Origin, Replica, SlotCall
from proxy.engine.scripted import Fault, ScriptedEngine, ScriptedReply
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.training.evaluations import open_evaluation
from proxy.pool.training.steps import Published
from proxy.prompt.template import ChatTemplate
from tests.pool.make import publish_next
from tests.proxy.conftest import Serve, Stand, listening, user

ROOT = Path(__file__).parents[2]


class FailsFirst:
    """A script that all replicas share, and whose first answer is a failure."""

    def __init__(self, fault: Fault):
        self.answers: list[str | Fault] = [fault]

    def __call__(self, prompt: str, ids: Sequence[int]) -> str | Fault:
        return self.answers.pop() if self.answers else "all is well"


def calls(stand: Stand) -> list[int]:
    return sorted(engine.calls for engine in stand.replicas)


async def states(stand: Stand) -> list[str]:
    async with stand.http.get(f"{stand.url}/health") as answer:
        return [replica["state"] for replica in (await answer.json())["replicas"]]


async def until(holds: Any) -> None:
    while not await holds():
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(status=429), Fault(text="one two three four", after=3)])
async def test_a_call_that_fails_is_sampled_again_elsewhere(serve: Serve, fault: Fault) -> None:
    stand = await serve(FailsFirst(fault), replicas=2)
    answer = await stand.chat(user("hi"))
    assert answer["status"] == 200 and answer["choices"][0]["message"]["content"] == "all is well"
    *partial, row = stand.recorded()
    assert row.untrainable is None and row.finish_reason == "stop" and calls(stand) == [1, 1]
    assert [(len(lost.sampled), lost.finish_reason) for lost in partial] == ([(3, "error")] if fault.after else [])
    assert all(str(lost.untrainable).startswith("engine_failed: died") for lost in partial)


async def test_a_call_that_moves_keeps_the_time_that_it_waited_for_a_place(serve: Serve) -> None:
    script = FailsFirst(Fault(status=500))
    script.answers.append("the first answer")
    stand = await serve(script, replicas=2, max_calls=2)  # one at a time for one session
    for engine in stand.replicas:
        engine.running.clear()
    both = [asyncio.ensure_future(stand.chat(user("hi"))) for _ in range(2)]

    async def one_waits() -> bool:
        async with stand.http.get(f"{stand.url}/metrics") as answer:
            return 'blackforge_calls_waiting{run="session 1"} 1.0\n' in await answer.text()

    await until(one_waits)
    began = time.monotonic()
    await asyncio.sleep(0.2)
    held = time.monotonic() - began
    for engine in stand.replicas:
        engine.running.set()
    assert [answer["status"] for answer in await asyncio.gather(*both)] == [200, 200] and sum(calls(stand)) == 3
    assert max(row.queued_seconds or 0.0 for row in stand.recorded()) > held


async def test_a_stream_of_which_nothing_has_left_goes_on_elsewhere(serve: Serve) -> None:
    stand = await serve(FailsFirst(Fault(status=500)), replicas=2)
    *events, last, done = await stand.stream(user("hi"))
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == "all is well" and last["choices"][0]["finish_reason"] == "stop" and done == "[DONE]"


async def test_a_stream_of_which_only_hidden_reasoning_was_sampled_goes_on_elsewhere(serve: Serve) -> None:
    stand = await serve(FailsFirst(Fault(text="<think>\none two three four", after=8)), replicas=2)
    path = "/v1beta/models/tiny:streamGenerateContent?alt=sse"
    events = await stand.events(path, {"contents": [{"parts": [{"text": "hi"}]}]})
    parts = [part for event in events for part in event["candidates"][0]["content"]["parts"]]
    assert "".join(part["text"] for part in parts) == "all is well" and calls(stand) == [1, 1]
    lost, row = stand.recorded()
    assert lost.reply["reasoning_content"].startswith("one") and row.untrainable is None


async def test_a_stream_that_has_begun_ends_and_its_retry_goes_elsewhere(serve: Serve) -> None:
    stand = await serve(FailsFirst(Fault(text="one two three four", after=3)), replicas=2)
    *_, event, done = await stand.stream(user("hi"))
    assert event["error"]["code"] == "engine_died" and done == "[DONE]"
    assert (await stand.chat(user("hi")))["status"] == 200
    assert calls(stand) == [1, 1]


async def test_the_call_after_a_failure_avoids_that_replica_until_one_is_served() -> None:
    fleet = Fleet(("http://127.0.0.1:9", "http://127.0.0.1:19"))
    for attempt in range(8):
        call = Origin(attempt, None, 0)
        home = fleet.pick(call, 100, set()).replica.url
        fleet.failed_for(attempt, home)
        assert fleet.pick(call, 100, set()).replica.url != home
        fleet.failed_for(attempt, None)
        assert fleet.pick(call, 100, set()).replica.url == home
    await fleet.close()


async def test_tries_are_bounded_and_a_refusal_is_not_tried_again(serve: Serve) -> None:
    broken = await serve(lambda prompt, ids: Fault(status=500), replicas=5)
    assert (await broken.chat(user("hi")))["status"] == 502 and calls(broken) == [0, 0, 1, 1, 1]
    strict = await serve(lambda prompt, ids: Fault(status=400), replicas=5)
    assert (await strict.chat(user("hi")))["status"] == 400 and calls(strict) == [0, 0, 0, 0, 1]


async def test_an_abandoned_call_is_stopped_at_the_replica_that_serves_it(serve: Serve) -> None:
    slow = ScriptedReply("word " * 500, seconds_per_token=0.05)
    stand = await serve(lambda prompt, ids: slow, replicas=3, limits={"linger_seconds": 0})
    async with stand.post({"messages": [user("talk")], "stream": True}) as answer:
        await answer.content.readany()

    async def stopped() -> bool:
        return sum(engine.aborted for engine in stand.replicas) == 1

    await until(stopped)
    assert [engine.calls for engine in stand.replicas] == [engine.aborted for engine in stand.replicas]


async def test_calls_of_one_session_meet_at_one_replica_and_sessions_spread(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", replicas=2)
    for number in range(30):
        before = [engine.calls for engine in stand.replicas]
        for _ in range(3):
            await stand.chat(user("hi"), key=f"agent-{number}")
        grown = [engine.calls - count for engine, count in zip(stand.replicas, before, strict=True)]
        assert sorted(grown) == [0, 3]
    assert min(engine.calls for engine in stand.replicas) > 0


@pytest.fixture(params=[{"dp_size": 4}, {"dp_size": 1, "attn_dp_size": 4}], ids=["replicas", "attention"])
async def ranked(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A replica with four data-parallel ranks and a cache store, and the calls that it receives."""
    bodies: list[dict[str, Any]] = []

    @web.middleware
    async def keep(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/generate":
            bodies.append(await request.json())
        return await handler(request)

    async with AsyncExitStack() as stack:
        engine = ScriptedEngine(lambda prompt, ids: "ok", ChatTemplate(tiny_model))
        engine.server |= {**request.param, "hicache_storage_backend": "file"}
        app = engine.app()
        app.middlewares.append(keep)
        yield await listening(app, stack), bodies


async def test_ranks_are_chosen_like_replicas_and_a_store_is_salted(
    serve: Serve, ranked: tuple[str, list[dict[str, Any]]]
) -> None:
    url, bodies = ranked
    stand = await serve(url=url)

    async def described() -> bool:
        async with stand.http.get(f"{stand.url}/health") as answer:
            return (await answer.json())["replicas"][0]["ranks"] == 4

    await until(described)
    for number in range(24):
        await stand.chat(user("hi"), key=f"agent-{number // 2}")
    ranks = [body["routed_dp_rank"] for body in bodies]
    assert ranks[::2] == ranks[1::2] and len(set(ranks)) > 1 and set(ranks) <= set(range(4))
    assert {body["cache_salt"] for body in bodies} == {"scripted"}


@pytest.mark.parametrize(
    ("drafts", "kept"),
    [
        ({"speculative_eagle_topk": 4, "speculative_num_steps": 5, "speculative_num_draft_tokens": 16}, 20),
        ({"speculative_eagle_topk": 1, "speculative_num_steps": 11, "speculative_num_draft_tokens": 12}, 12),
        ({"speculative_eagle_topk": 1, "speculative_num_steps": 3, "speculative_num_draft_tokens": 4}, 8),
        ({"speculative_eagle_topk": None, "speculative_num_steps": None, "speculative_num_draft_tokens": None}, 8),
    ],
)
async def test_a_prompt_and_its_answer_leave_what_the_replica_with_the_most_drafts_keeps(
    serve: Serve, tiny_model: Path, drafts: dict[str, Any], kept: int
) -> None:
    lengths: list[int] = []

    def script(prompt: str, ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return "ok"

    async with AsyncExitStack() as stack:
        plain, drafting = engines = [ScriptedEngine(script, ChatTemplate(tiny_model)) for _ in range(2)]
        drafting.server |= {"dp_size": 2, **drafts}
        stand = await serve(url=tuple([await listening(engine.app(), stack) for engine in engines]), context_length=500)

        async def described() -> bool:
            async with stand.http.get(f"{stand.url}/health") as answer:
                return [replica["ranks"] for replica in (await answer.json())["replicas"]] == [1, 2]

        await until(described)
        assert (await stand.chat(user("hi")))["status"] == 200
        asked = plain if plain.calls else drafting
        assert lengths[0] + asked.last_params["max_new_tokens"] == 500 - kept
        answer = await stand.chat(user(" a" * 500))
        assert (answer["status"], answer["error"]["code"]) == (400, "context_length_exceeded")
        assert f"maximum context length is {500 - kept} tokens" in answer["error"]["message"]


@pytest.mark.parametrize(("status", "slots"), [(500, [1, 2]), (404, [1, 1])])
async def test_a_replica_that_does_not_say_what_it_is_is_asked_again(
    tiny_model: Path, status: int, slots: list[int]
) -> None:
    """But one without the route is no SGLang."""
    refused = [status]

    @web.middleware
    async def refuse(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == "/server_info" and refused:
            return web.json_response({}, status=refused.pop())
        return await handler(request)

    async with asyncio.timeout(60), AsyncExitStack() as stack:
        engine = ScriptedEngine(lambda prompt, ids: "ok", ChatTemplate(tiny_model))
        engine.server["dp_size"] = 2
        app = engine.app()
        app.middlewares.append(refuse)
        fleet = Fleet([await listening(app, stack)])
        stack.push_async_callback(fleet.close)
        [replica] = fleet.replicas

        async def checked() -> bool:
            return replica.version == engine.version

        await until(checked)
        first = len(replica.slots)
        engine.version = "later"
        replica.woken.set()
        await until(checked)
        assert [first, len(replica.slots)] == slots and replica.circuit.state == "closed"


async def test_a_fleet_closes_although_a_replica_was_just_woken(tiny_model: Path) -> None:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        engine = ScriptedEngine(lambda prompt, ids: "ok", ChatTemplate(tiny_model))
        fleet = Fleet([await listening(engine.app(), stack)])
        [replica] = fleet.replicas

        async def waiting() -> bool:
            return replica.version != "" and not replica.woken.is_set()

        await until(waiting)
        replica.woken.set()
        await fleet.close()


async def test_new_weights_and_a_lost_replica_forget_what_was_cached() -> None:
    replica, call = Replica("http://127.0.0.1:9", 1), Origin(1, 7, 900)
    (state,) = replica.slots
    for lose in (lambda: replica.serves("v2"), lambda: replica.failed("died")):
        state.cached.note(call, 1000)
        assert state.cached.of(call, 1200) == 900
        lose()
        assert state.cached.of(call, 1200) == 0
    await replica.client.close()


@pytest.mark.parametrize(("stream", "version"), [(True, "v1"), (False, "v1"), (True, "v2")])
async def test_only_the_first_token_of_a_stream_without_an_update_measures_the_prefill(
    stream: bool, version: str
) -> None:
    replica = Replica("http://127.0.0.1:9", 1)
    replica.serves("v1")
    (state,) = replica.slots
    request = SamplingRequest(prompt=b"[]", prompt_length=1000, max_new_tokens=1, stream=stream)
    visit = SlotCall(state, Origin(1, None, 0), request)
    assert (state.in_flight, state.waiting) == (1, 1000)
    visit.sampled(Sampling(version=version))
    visit.end()
    assert (state.in_flight, state.waiting) == (0, 0)
    assert (state.meter.rate is not None) == (stream and version == "v1")
    await replica.client.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_health_names_queue_and_accept_length_where_the_engine_tells_them(serve: Serve, stream: bool) -> None:
    replies = iter([ScriptedReply("one two", verifications=1), ScriptedReply("one two three", verifications=3)])
    stand = await serve(lambda prompt, ids: next(replies, "nothing drafted"))

    async def told() -> tuple[int | None, float | None]:
        async with stand.http.get(f"{stand.url}/health") as answer:
            (replica,) = (await answer.json())["replicas"]
        return replica["queue"], replica["accept_length"]

    assert stand.engine is not None and await told() == (None, None)
    stand.engine.waiting = [2, 0, 1]
    assert await told() == (3, None)
    for _ in range(3):
        await stand.chat(user("hi")) if not stream else await stand.stream(user("hi"))
    drafted = sum(len(row.sampled) for row in stand.recorded()[:2])
    assert await told() == (3, drafted / 4)


def test_a_group_shares_its_first_prompt() -> None:
    replica_holds = Origin(1, 7, 0), Origin(2, 7, 0), Origin(3, 8, 0)
    assert [one.key for one in replica_holds] == ["group 7", "group 7", "group 8"]
    assert Origin(3, None, 0).key == "attempt 3"


def test_a_circuit_opens_tries_one_call_and_closes() -> None:
    circuit = Circuit()
    for _ in range(FAILURES - 1):
        circuit.failed("failed")
    assert circuit.admits()
    circuit.failed("failed")
    assert circuit.state == "open" and not circuit.admits()
    circuit.answered()
    circuit.begun()
    assert circuit.state == "half-open" and not circuit.admits()
    circuit.failed("failed")
    assert circuit.state == "open"
    circuit.answered()
    circuit.begun()
    circuit.sampled()
    assert circuit.state == "closed" and circuit.admits()
    circuit.failed("failed")
    assert circuit.state == "open"
    circuit.sampled()
    circuit.served()
    circuit.failed("failed")
    assert circuit.state == "closed"
    circuit.failed("died")
    assert circuit.state == "open"


def test_a_replica_that_always_fails_after_its_first_tokens_is_taken_out() -> None:
    circuit = Circuit()
    for _ in range(FAILURES):
        assert circuit.admits()
        circuit.begun()
        circuit.sampled()
        circuit.failed("failed")
    assert not circuit.admits()


def test_pauses_grow_until_a_call_is_served() -> None:
    circuit = Circuit()
    pauses = [circuit.pause() for _ in range(10)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE] and pauses[-1] == LONGEST_PAUSE
    circuit.served()
    assert circuit.pause() == FIRST_PAUSE


async def update(stand: Stand, url: str, version: str) -> None:
    body = {"model_path": "any", "weight_version": version}
    async with stand.http.post(f"{url}/update_weights_from_disk", json=body) as answer:
        assert answer.status == 200


async def test_a_replica_with_other_weights_stays_out_until_it_is_up_to_date(serve: Serve, tiny_model: Path) -> None:
    def engine() -> web.Application:
        return ScriptedEngine(lambda prompt, ids: "ok", ChatTemplate(tiny_model)).app()

    async with AsyncExitStack() as stack:
        kept, port = await listening(engine(), stack), process.free_port()
        lost = f"http://127.0.0.1:{port}"
        stand = await serve(url=(kept, lost))

        async def opened() -> bool:
            return await states(stand) == ["closed", "open"]

        await until(opened)
        await update(stand, kept, "v2")

        async def noticed() -> bool:
            await stand.chat(user("hi"))
            async with stand.http.get(f"{stand.url}/health") as answer:
                return (await answer.json())["replicas"][0]["version"] == "v2"

        await until(noticed)
        asked: list[str] = []

        @web.middleware
        async def note(request: web.Request, handler: Any) -> web.StreamResponse:
            asked.append(request.path)
            return await handler(request)

        app = engine()
        app.middlewares.append(note)
        await listening(app, stack, port)

        async def probed() -> bool:
            return asked.count("/model_info") >= 2

        await until(probed)
        assert await states(stand) == ["closed", "open"] and "/generate" not in asked
        await update(stand, lost, "v2")

        async def admitted() -> bool:
            return await states(stand) == ["closed", "half-open"]

        await until(admitted)


class Processes:
    """Scripted engines in processes of their own."""

    def __init__(self, model: Path, directory: Path):
        self.directory = directory
        self.ports = [process.free_port() for _ in range(2)]
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        (directory / "script.py").write_text(SLOW)
        for port in self.ports:
            (directory / f"{port}.toml").write_text(f'[engine]\nmodel = "{model}"\nport = {port}\n')

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self.ports)

    async def start(self, number: int) -> None:
        port = self.ports[number]
        ready = self.directory / f"{port}.ready"
        ready.unlink(missing_ok=True)
        words = ["engine", f"{port}.toml", "--scripted", "script.py:answer", "--ready-file", str(ready)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "proxy", *words]
        self.running[number] = subprocess.Popen(command, cwd=self.directory, env=environment)
        while not ready.exists():
            assert self.running[number].poll() is None
            await asyncio.sleep(0.05)

    def kill(self, number: int) -> None:
        engine = self.running.pop(number)
        engine.send_signal(signal.SIGKILL)
        engine.wait()


SLOW = """
from proxy.engine.scripted import ScriptedReply

def answer(prompt, ids):
    return ScriptedReply("one two three four five", seconds_per_token=0.01)
"""


@pytest.fixture
async def engines(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Processes]:
    processes = Processes(tiny_model, tmp_path)
    try:
        await asyncio.gather(processes.start(0), processes.start(1))
        yield processes
    finally:
        for number in list(processes.running):
            processes.kill(number)


ROLLOUTS, TURNS = 16, 8


async def test_a_replica_that_is_killed_costs_no_rollout(serve: Serve, engines: Processes) -> None:
    stand = await serve(url=engines.urls)
    served = 0

    async def rollout(key: str) -> None:
        nonlocal served
        messages = [user("begin")]
        for _ in range(TURNS):
            answer = await stand.chat(*messages, key=key)
            assert answer["status"] == 200, answer
            messages += [answer["choices"][0]["message"], user("go on")]
            served += 1

    running = asyncio.gather(*(rollout(f"agent-{number}") for number in range(ROLLOUTS)))
    while served < ROLLOUTS and not running.done():
        await asyncio.sleep(0.01)
    engines.kill(0)
    await running
    rows = [row for number in range(ROLLOUTS) for row in stand.recorded(f"agent-{number}")]
    assert len([row for row in rows if row.untrainable is None]) == ROLLOUTS * TURNS
    assert {row.finish_reason for row in rows if row.untrainable} <= {"error"}

    async def opened() -> bool:
        return await states(stand) == ["open", "closed"]

    await until(opened)
    await engines.start(0)
    newcomers = iter(range(10_000))

    async def joined() -> bool:
        assert (await stand.chat(user("hi"), key=f"newcomer-{next(newcomers)}"))["status"] == 200
        return await states(stand) == ["closed", "closed"]

    await until(joined)


async def test_before_anything_is_published_a_replica_that_was_not_seen_yet_gets_no_preference() -> None:
    fleet = Fleet(["http://127.0.0.1:9", "http://127.0.0.1:10"])
    fleet.replicas[0].serves("by hand")
    assert fleet.others(set()) == fleet.replicas
    await fleet.close()


async def test_a_replica_that_a_push_left_behind_gets_no_calls_until_it_is_there(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", replicas=2)
    ahead, behind = stand.replicas
    run = open_run(stand.pool, "a run", "train", {})

    def publish(step: int) -> str:
        return publish_next(stand.pool, run.id, Published(step=step, checkpoint="", hf_dir="", metrics={})).name

    keys = (f"session-{number}" for number in itertools.count())

    async def asked() -> list[int]:
        """How many calls of new sessions each replica gets."""
        before = ahead.calls, behind.calls
        for key in itertools.islice(keys, 16):
            await stand.chat(user("hi"), key=key)
        return [ahead.calls - before[0], behind.calls - before[1]]

    ahead.version = behind.version = publish(0)
    ahead.version = publish(1)

    async def left_alone() -> bool:
        return await asked() == [16, 0]

    async def shared() -> bool:
        return min(await asked()) > 0

    await until(left_alone)
    behind.version = f"{ahead.version}-loading"  # a push is at it
    assert await asked() == [16, 0]
    behind.version = ahead.version
    await until(shared)
    ahead.version = behind.version = "by hand"  # nobody serves what was published: everybody serves
    await asked()  # what the answers name is what the proxy takes them to serve from then on
    await until(shared)


async def test_calls_that_an_engine_keeps_waiting_whose_update_failed_are_sampled_elsewhere(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the push is at it, and not those of which something has come: their engine ends them itself."""
    monkeypatch.setattr("proxy.engine.replicas.fleet.CHECK_SECONDS", 0.2)
    text = " ".join(str(number) for number in range(1000, 1040))

    def script(prompt: str, ids: Sequence[int]) -> ScriptedReply:
        return ScriptedReply(text, seconds_per_token=0.05) if "count" in prompt else ScriptedReply("ok")

    stand = await serve(script, replicas=2)
    ahead, failed = stand.replicas
    run = open_run(stand.pool, "a run", "train", {})
    old, new = (
        publish_next(stand.pool, run.id, Published(step=step, checkpoint="", hf_dir="", metrics={})).name
        for step in range(2)
    )
    ahead.version = failed.version = old
    streams = [bytearray() for _ in range(8)]

    async def read(number: int) -> None:
        body = {"model": "tiny", "messages": [user("count")], "stream": True}
        async with stand.post(body, f"begun-{number}") as answer:
            async for chunk in answer.content.iter_any():
                streams[number] += chunk

    async def names() -> set[str]:
        async with stand.http.get(f"{stand.url}/health") as answer:
            return {replica["version"] for replica in (await answer.json())["replicas"]}

    reading = asyncio.gather(*map(read, range(8)))
    while not all(stream.count(b"data:") > 2 for stream in streams):
        await asyncio.sleep(0.01)
    begun = ahead.calls, failed.calls
    for engine in stand.replicas:
        engine.running.clear()
    asking = asyncio.gather(*(stand.chat(user("hi"), key=f"session-{number}") for number in range(16)))
    while sum(calls(stand)) < 24:
        await asyncio.sleep(0.01)
    waiting = failed.calls - begun[1]
    assert min(begun) > 0 and waiting > 0
    ahead.version = failed.version = f"{new}-loading"
    while await names() != {f"{new}-loading"}:
        await asyncio.sleep(0.05)
    await asyncio.sleep(2)  # seconds in which a push is at it
    assert sum(calls(stand)) == 24
    ahead.version = new
    ahead.running.set()
    answers = await asyncio.wait_for(asking, 30)
    assert {answer["status"] for answer in answers} == {200} and not reading.done()
    assert [ahead.calls, failed.calls] == [16 + begun[0], begun[1] + waiting]
    failed.version = new
    failed.running.set()
    await reading
    assert all(b'"finish_reason":"stop"' in stream and stream.rstrip().endswith(b"[DONE]") for stream in streams)


async def back(stand: Stand) -> bool:
    """Whether every replica may get calls."""
    return "open" not in await states(stand)


async def test_an_evaluation_is_sampled_where_its_version_is_held(serve: Serve) -> None:
    faults: list[Fault] = []
    stand = await serve(lambda prompt, ids: faults.pop() if faults else "ok", replicas=2)
    ahead, held = stand.replicas
    training = open_run(stand.pool, "a run", "train", {})
    first, second = (
        publish_next(stand.pool, training.id, Published(step=step, checkpoint="", hf_dir="", metrics={}))
        for step in range(2)
    )
    ahead.version = held.version = first.name
    async with stand.http.get(f"{stand.url}/health") as answer:
        url = (await answer.json())["replicas"][1]["url"]
    evaluation = open_evaluation(stand.pool, training, first, {}, engine=url, rollouts=64)

    async def asked(run_id: int) -> list[int]:
        """How many calls of 16 new groups of a run each replica gets."""
        before = ahead.calls, held.calls
        for _ in range(16):
            [member] = open_group(stand.pool, run_id, {"id": "task"}, 1)
            await stand.chat(user("hi"), key=open_attempt(stand.pool, member.rollout_id, "agent")[1])
        return [ahead.calls - before[0], held.calls - before[1]]

    async def shown() -> bool:
        async with stand.http.get(f"{stand.url}/health") as answer:
            seen = [replica["version"] for replica in (await answer.json())["replicas"]]
        return seen == [ahead.version, held.version]

    await until(shown)
    assert await asked(evaluation.run_id) == [0, 16]  # before a push, too, so that none comes into the middle of it
    ahead.version = second.name
    await until(shown)
    assert await asked(evaluation.run_id) == [0, 16] and await asked(training.id) == [16, 0]
    faults.append(Fault(text="o", after=1))  # the held engine dies under a call, and comes back as it was
    await asked(evaluation.run_id)
    async with asyncio.timeout(20):
        await until(lambda: back(stand))
    assert await asked(evaluation.run_id) == [0, 16] and await asked(training.id) == [16, 0]
    held.version = second.name
    await until(shown)
    assert min(await asked(evaluation.run_id)) > 0  # its version is gone, and the newest takes its calls
