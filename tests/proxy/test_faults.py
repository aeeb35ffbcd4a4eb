"""Every fault of an engine in every dialect, streamed and not: what the client is told and what the pool keeps.

Each fault meets all ten kinds of call at once, at one gateway. What clients do with it is in test_agents (harness).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import msgspec
import pytest

from proxy.engine.scripted import Fault, ScriptedReply
from proxy.pool.inspect.verify import verify
from tests.proxy.conftest import Serve, Stand
from tests.proxy.dialect_clients import DIALECT_CLIENTS, DialectClient, body_of, events

CALLS = list(product(DIALECT_CLIENTS, (False, True)))
TEXT = "one two three four five"
OPENAI = ("chat", "responses", "completions")
TYPES = {502: "api_error", 503: "overloaded_error", 504: "timeout_error"}
"""Anthropic's names of what its clients send again."""


@dataclass(frozen=True)
class Outcome:
    """What one client got: an answer of some status, the kind of its error and the message."""

    status: int
    kind: Any
    message: str
    retry_after: str | None
    begun: bool
    """Whether text had come before."""


async def ask(stand: Stand, dialect: DialectClient, stream: bool) -> Outcome:
    path, body = dialect.request("count", stream)
    async with stand.send(path, body, **{"x-api-key": f"{dialect.name} {stream}"}) as answer:
        data, status, retry = await body_of(answer), answer.status, answer.headers.get("Retry-After")
    streamed = answer.content_type == "text/event-stream"
    kind, message = dialect.error(events(data)[-1] if streamed else msgspec.json.decode(data))
    return Outcome(status, kind, message, retry, streamed and dialect.text_of(data, True) != "")


async def ask_all(stand: Stand) -> list[Outcome]:
    return await asyncio.gather(*(ask(stand, *call) for call in CALLS))


def kind(dialect: DialectClient, status: int, code: str) -> Any:
    """The dialect's name for an error after which a client may try again."""
    return code if dialect.name in OPENAI else status if dialect.name == "gemini" else TYPES[status]


def ended(status: int | None) -> str:
    """The event by which SGLang ends a call on its own."""
    finish = {"type": "abort", "message": "The request queue is full.", "status_code": status}
    return msgspec.json.encode({"output_ids": [], "meta_info": {"finish_reason": finish}}).decode()


FAULTS: dict[str, tuple[Fault | ScriptedReply, int, str, str]] = {
    "429": (Fault(status=429), 503, "busy", "HTTP 429"),
    "503": (Fault(status=503), 503, "busy", "HTTP 503"),
    "500": (Fault(status=500), 502, "failed", "HTTP 500"),
    "404": (Fault(status=404), 502, "failed", "HTTP 404"),
    "reset": (Fault(text=TEXT), 502, "died", "broke off after 0 tokens"),
    "reset late": (Fault(text=TEXT, after=3), 502, "died", "broke off after"),
    "cut": (Fault(text=TEXT, cut=True), 502, "died", "ended its stream after 0 tokens"),
    "cut late": (Fault(text=TEXT, after=3, cut=True), 502, "died", "ended its stream after 3 tokens"),
    "no event": (Fault(text=TEXT, after=3, garbage='{"output_ids": ["x"]}'), 502, "died", "Expected `int`"),
    "no token": (Fault(text=TEXT, after=3, garbage='{"output_ids": [-1]}'), 502, "died", "Expected `int` >= 0"),
    "no JSON": (Fault(text=TEXT, after=3, garbage='{"output_ids": [1'), 502, "died", "Input data was truncated"),
    "error": (Fault(text=TEXT, after=3, garbage='{"error": {"message": "boom"}}'), 502, "failed", "boom"),
    "queue full": (Fault(text=TEXT, after=3, garbage=ended(503)), 503, "busy", "queue is full"),
    "aborted": (Fault(text=TEXT, after=3, garbage=ended(None)), 502, "failed", "the engine aborted the call"),
    "few logprobs": (ScriptedReply(TEXT, logprobs=3), 502, "no_logprobs", "logprobs for"),
}
"""Of each: the status where nothing has left yet, the kind of the engine's failure, words of the message."""


@pytest.mark.parametrize("name", FAULTS)
async def test_a_failed_call_says_so_in_its_dialect_and_is_not_trained(serve: Serve, name: str) -> None:
    fault, status, failure, words = FAULTS[name]
    stand = await serve(lambda prompt, ids: fault, max_new_tokens=100)
    for (dialect, stream), outcome in zip(CALLS, await ask_all(stand), strict=True):
        begun = stream and (isinstance(fault, ScriptedReply) or fault.after > 0)
        expected = (200, None, True) if begun else (status, "1", False)
        assert (outcome.status, outcome.retry_after, outcome.begun) == expected, dialect.name
        assert outcome.kind == kind(dialect, status, f"engine_{failure}") and words in outcome.message, dialect.name
        assert outcome.message.endswith("; try again in 1s")
        for row in stand.recorded(f"{dialect.name} {stream}"):
            assert row.finish_reason == "error" and str(row.untrainable).startswith(f"engine_failed: {failure}"), (
                dialect.name
            )
            assert begun or row.untrainable is not None
        assert bool(stand.recorded(f"{dialect.name} {stream}")) or not begun
    assert verify(stand.pool).damages == []


@pytest.mark.parametrize("after", [0, 3])
async def test_a_refusal_by_an_event_is_the_requests_fault_and_not_tried_again(serve: Serve, after: int) -> None:
    refusal = '{"error": {"message": "top_p must be in (0, 1]", "type": "invalid_request_error", "code": 400}}'
    stand = await serve(lambda prompt, ids: Fault(text=TEXT, after=after, garbage=refusal), replicas=2)
    streamed = [(dialect, stream) for dialect, stream in CALLS if stream]
    for dialect, stream in streamed:
        outcome = await ask(stand, dialect, stream)
        assert (outcome.status, outcome.retry_after, outcome.begun) == ((200 if after else 400), None, after > 0)
        assert outcome.message == "the engine reported an error: top_p must be in (0, 1]"
        assert dialect.name not in OPENAI or outcome.kind == "engine_refused"
    assert sum(engine.calls for engine in stand.replicas) == len(streamed)
    async with stand.http.get(f"{stand.url}/health") as answer:
        assert [replica["failures"] for replica in (await answer.json())["replicas"]] == [0, 0]


async def test_a_hanging_engine_is_given_up(serve: Serve) -> None:
    fault = Fault(text=TEXT, after=3, hang=True)
    stand = await serve(lambda prompt, ids: fault, silence=3, max_new_tokens=100)
    for (dialect, stream), outcome in zip(CALLS, await ask_all(stand), strict=True):
        assert outcome.kind == kind(dialect, 504, "engine_silent") and "sent nothing for too long" in outcome.message
        assert (outcome.status, outcome.retry_after) == ((200, None) if stream else (504, "1"))
        assert [len(row.sampled) for row in stand.recorded(f"{dialect.name} {stream}")] == ([3] if stream else [])


VERSIONS = {
    "none": (),
    "a gap": (("a", 0, 2), ("b", 3, 6)),
    "twice": (("a", 0, 3), ("b", 0, 3)),
    "too few": (("a", 0, 5),),
    "too many": (("a", 0, 7),),
}


@pytest.mark.parametrize("name", VERSIONS)
async def test_tokens_of_unknown_weights_are_served_and_not_trained(serve: Serve, name: str) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply("", ids=(20, 21, 22, 23, 24), versions=VERSIONS[name]))
    for stream in (False, True):
        path, body = DIALECT_CLIENTS[0].request("hi", stream)
        async with stand.send(path, body) as answer:
            assert answer.status == 200 and await answer.read()
    for row in stand.recorded():
        assert len(row.sampled) == 6 and str(row.untrainable).startswith("version_missing: first")


ALIVE = {
    "chat": b": keep-alive",
    "completions": b": keep-alive",
    "messages": b'"text_delta","text":""',
    "responses": b"response.in_progress",
}
"""What a dialect's clients take for a sign of life. Gemini's wait once they have the headers."""


class PausedAfterOneEvent(asyncio.Event):
    """Lets each call of an engine send one event, and the others when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = set[asyncio.Task[Any] | None]()

    async def wait(self) -> Literal[True]:
        if (call := asyncio.current_task()) not in self._begun:
            self._begun.add(call)
            return True
        return await super().wait()


async def test_an_engine_that_is_paused_and_updated_in_mid_stream(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply(TEXT, tokens_per_event=4), limits={"keepalive_seconds": 0.1})
    assert stand.engine is not None
    stand.engine.running = PausedAfterOneEvent()  # no stream may end before the last one has begun
    got = {dialect.name: bytearray() for dialect in DIALECT_CLIENTS}
    reading = [asyncio.ensure_future(read(stand, dialect, got[dialect.name])) for dialect in DIALECT_CLIENTS]
    await until(lambda: all(dialect.text_of(bytes(got[dialect.name]), True) for dialect in DIALECT_CLIENTS))
    begun = {name: data.count(ALIVE.get(name, b"")) for name, data in got.items()}
    await until(lambda: all(got[name].count(mark) > begun[name] for name, mark in ALIVE.items()))
    stand.engine.version = "after"
    stand.engine.running.set()
    await asyncio.gather(*reading)
    for dialect in DIALECT_CLIENTS:
        assert dialect.text_of(bytes(got[dialect.name]), True) == TEXT
        [row] = stand.recorded(dialect.name)
        assert row.untrainable is None and [span.version for span in row.versions] == ["scripted", "after"]
    assert verify(stand.pool).damages == []


async def read(stand: Stand, dialect: DialectClient, into: bytearray) -> None:
    path, body = dialect.request("count", True)
    async with stand.send(path, body, **{"x-api-key": dialect.name}) as answer:
        async for chunk in answer.content.iter_any():
            into += chunk


async def until(reached: Callable[[], bool]) -> None:
    while not reached():
        await asyncio.sleep(0.01)
