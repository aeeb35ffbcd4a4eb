"""Generated requests to a real gateway: each is answered, none with a 5xx, every error in its dialect's format.

What is answered with 200 has left its row, and only that has. `make test` sends a fixed sample of them, the long test
more than 10,000. Left out: bytes that are no HTTP (tests/proxy/test_limits.py), and what an engine may do wrong.
"""

import asyncio
import http.client
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zlib import crc32

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.scripted import ScriptedEngine, ScriptedReply
from proxy.http.limits import RequestLimits
from proxy.pool.database import Pool, open_pool
from proxy.pool.inspect.verify import verify
from proxy.pool.schema import completions
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from tests.proxy.conftest import listening, served, shell_call
from tests.proxy.generated import GRAMMARS, Request, requests

FEW = settings(max_examples=120, derandomize=True, database=None, deadline=None)
MANY = settings(FEW, max_examples=2300, suppress_health_check=list(HealthCheck))
REFUSALS = {400, 401, 404, 405, 413, 415, 417, 431}
ANSWERS: list[str | ScriptedReply] = [
    "ok",
    "",
    shell_call("ls"),
    f"I look.\n{shell_call('ls')}\n{shell_call('pwd')}",
    "<think>\nwell\n</think>\n\nok",
    "<think>\nthere is no end",
    '<tool_call>\n{"name": "shell", "arguments": {"command": "l',
    "\U0001f980 <|im_start|> \u00e9",
    ScriptedReply("cut off", end=False),
]
SAYS_ERROR: dict[str, Callable[[Any, int], bool]] = {
    "messages": lambda body, status: set(body) == {"type", "error"} and set(body["error"]) == {"type", "message"},
    "gemini": lambda body, status: set(body["error"]) == {"code", "message", "status"},
    "": lambda body, status: set(body["error"]) == {"message", "type", "param", "code"},
}
LAST_EVENTS = {
    "chat": b"data: [DONE]",
    "completions": b"data: [DONE]",
    "messages": b'"message_stop"',
    "gemini": b'"finishReason"',
    "responses": b'"usage":{',
}


@dataclass
class Target:
    """A gateway in its own thread, with the statuses that it answered so far."""

    port: int
    pool: Pool
    seen: Counter[int] = field(default_factory=Counter)
    rows: int = 0

    def send(self, request: Request) -> None:
        """Send a request and check the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        path = quote(request.path, safe="/:?=&%")
        headers = dict(request.headers)
        if not {"Authorization", "x-api-key"} & set(headers):
            headers["x-goog-api-key"] = f"key-{self.seen.total() // 200}"
        encoded = {name: value.encode("utf-8", "surrogateescape") for name, value in headers.items()}
        connection.request(request.method, path, request.body, encoded)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        self.seen[answer.status] += 1
        self._check(request, answer.status, body)

    def _check(self, request: Request, status: int, body: bytes) -> None:
        before, self.rows = self.rows, self._count()
        if status == 200:
            assert self.rows - before == (answers(body) if request.samples else 0)
            if not body.startswith(b"{"):
                assert LAST_EVENTS[request.dialect] in body.rstrip().rpartition(b"\n\n")[2], body[-300:]
                assert b'"error":{' not in body
            return
        assert status in REFUSALS and self.rows == before
        if request.method != "HEAD":
            form = request.dialect if request.dialect in SAYS_ERROR else ""
            answer = msgspec.json.decode(body)
            assert answer["error"]["message"] and (status == 431 or SAYS_ERROR[form](answer, status)), answer

    def _count(self) -> int:
        with self.pool.read() as connection:
            return connection.scalar(select(func.count()).select_from(completions)) or 0


def answers(body: bytes) -> int:
    """The number of answers in a body or a stream of events."""
    texts = [body] if body.startswith(b"{") else [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    events = [msgspec.json.decode(text) for text in texts]
    return len({one["index"] for event in events for one in event.get("choices") or event.get("candidates") or ()}) or 1


@pytest.fixture(scope="module")
def target(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A real gateway with a scripted engine, whose answer depends only on the prompt."""
    file = str(tmp_path_factory.mktemp("malformed") / "pool.db")
    ready, over = threading.Event(), asyncio.Event()
    address: list[Any] = []

    def answer(prompt: str, ids: Sequence[int]) -> str | ScriptedReply:
        return ANSWERS[crc32(prompt.encode(errors="replace")) % len(ANSWERS)]

    async def serve() -> None:
        async with AsyncExitStack() as stack:
            engine = await listening(ScriptedEngine(answer, ChatTemplate(tiny_model)).app(), stack)
            config = ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=file)
            patient = RequestLimits(free_refusals=100_000)  # some keys are malformed
            url = await served(Gateway(config, engine, limits=patient), stack)
            address.extend([asyncio.get_running_loop(), int(url.rpartition(":")[2])])
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    loop, port = address
    yield Target(port, open_pool(file))
    loop.call_soon_threadsafe(over.set)
    thread.join(60)


@pytest.mark.parametrize("dialect", GRAMMARS)
def test_a_sample_of_generated_requests(dialect: str, target: Target) -> None:
    _send(target, dialect, FEW)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dialect", GRAMMARS)
def test_thousands_of_generated_requests(dialect: str, target: Target) -> None:
    seen = _send(target, dialect, MANY)
    print(f"{dialect}: {seen.total()} requests, {dict(sorted(seen.items()))}")
    assert seen.total() >= 2000 and verify(target.pool).damages == []


def _send(target: Target, dialect: str, sample: settings) -> Counter[int]:
    """Count the answers to a sample of generated requests by status."""
    before = target.seen.copy()

    @sample
    @given(request=requests(dialect))
    def send(request: Request) -> None:
        target.send(request)

    send()
    seen = target.seen - before
    assert seen[200] > seen.total() / 8 and seen[400] > seen.total() / 8, seen
    return seen


NO_ROUTES = st.text(alphabet="/.:%\u00e4ab01?#&=v", max_size=20).map(lambda text: "/" + quote(text, safe="/.:?&="))


@settings(max_examples=100, derandomize=True, database=None, deadline=None)
@given(path=NO_ROUTES, method=st.sampled_from(["GET", "POST", "DELETE", "PROPFIND"]), body=st.binary(max_size=9))
def test_paths_that_lead_nowhere(path: str, method: str, body: bytes, target: Target) -> None:
    target.send(Request("", path, body, method))
