"""What one client can hold of the proxy: connections, bytes and calls. Whatever it does, the others are served."""

import asyncio
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.scripted import ScriptedEngine, ScriptedReply
from proxy.http.bodies import BodyBytes, HeldBody
from proxy.http.connections import Places
from proxy.http.limits import RequestLimits
from proxy.pool.database import open_pool
from proxy.pool.processes.parent import die_with_parent
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from tests.proxy.conftest import Serve, Stand, listening, user
from tests.proxy.test_auth import attempts
from tests.proxy.test_cli import wait_until

HI = msgspec.json.encode({"messages": [user("hi")]})
MIB = 1 << 20


class Wire:
    """Raw connections to a proxy, closed at the end."""

    def __init__(self, url: str):
        self._port = int(url.rpartition(":")[2])
        self.open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, data: bytes, count: int = 1) -> asyncio.StreamReader:
        """Send the same on this many new connections; the reader is the last one's."""
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(data)
            self.open.append((reader, writer))
        return reader

    async def drain(self) -> None:
        """Wait until everything is sent, or its connection has ended."""
        await asyncio.gather(*(writer.drain() for _, writer in self.open), return_exceptions=True)

    def close(self) -> None:
        for _, writer in self.open:
            writer.close()


@pytest.fixture
async def wire() -> AsyncIterator[Callable[[str], Wire]]:
    wires: list[Wire] = []

    def make(url: str) -> Wire:
        wires.append(Wire(url))
        return wires[-1]

    yield make
    for one in wires:
        one.close()


def head(key: str, length: int) -> bytes:
    """A request without its body."""
    lines = ("POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}")
    return "\r\n".join((*lines, f"Content-Length: {length}", "", "")).encode()


async def status_of(reader: asyncio.StreamReader) -> int:
    """The status of the answer; 0 when the connection ended without one."""
    try:
        line = await asyncio.wait_for(reader.readline(), 60)
    except ConnectionResetError:
        return 0
    return int(line.split()[1]) if line else 0


async def first_status(readers: list[asyncio.StreamReader]) -> tuple[list[int], int]:
    """The statuses of the connections that are answered first, and how many wait on."""
    tasks = [asyncio.create_task(status_of(reader)) for reader in readers]
    answered, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    return [task.result() for task in answered], len(waiting)


async def test_half_open_requests_and_bodies_leave_room_for_others(
    tiny_model: Path, tmp_path: Path, wire: Callable[[str], Wire]
) -> None:
    """Half-open requests once took every file descriptor, and unfinished bodies as much memory as they had bytes."""
    async with AsyncExitStack() as stack:
        engine = await listening(ScriptedEngine(lambda prompt, ids: "ok", ChatTemplate(tiny_model)).app(), stack)
        url, pid = await serving(tiny_model, tmp_path, engine, stack, files=300)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)))
        greedy, before = wire(url), memory(pid)
        await greedy.send(head("greedy bodies", 32 * MIB) + bytes(31 * MIB), count=12)
        await greedy.drain()
        assert await served(http, url, "somebody") and memory(pid) - before < 340 * MIB
        for _ in range(4):
            await greedy.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n", count=100)
            await greedy.send(head("greedy", 100) + b'{"mess', count=100)
            assert await served(http, url, "somebody")
        async with http.get(f"{url}/metrics") as answer:
            assert answer.status == 200


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_three_thousand_half_open_requests_and_forty_bodies_leave_room_for_others(
    tiny_model: Path, tmp_path: Path
) -> None:
    """So many once took all descriptors and 1.2 GB. They come from processes whose own descriptors are enough."""
    async with AsyncExitStack() as stack:
        engine = await listening(ScriptedEngine(lambda prompt, ids: "ok", ChatTemplate(tiny_model)).app(), stack)
        url, pid = await serving(tiny_model, tmp_path, engine, stack, files=1024)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)))
        before = memory(pid)
        assert await greedy(stack, url, 40, 31 * MIB, head("greedy bodies", 32 * MIB)) == 40
        assert await served(http, url, "somebody") and memory(pid) - before < 340 * MIB
        opened = 0
        for key in ("one", "two"):
            opened += await greedy(stack, url, 750, 0, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
            assert await served(http, url, "somebody")
            opened += await greedy(stack, url, 750, 6, head(key, 100))
            assert await served(http, url, "somebody")
        async with http.get(f"{url}/metrics") as answer:
            assert answer.status == 200 and opened == 3000


async def greedy(stack: AsyncExitStack, url: str, count: int, body: int, start: bytes) -> int:
    """How many connections a process of its own has opened and never ends its requests on: tests/proxy/greedy.py."""
    words = [sys.executable, str(Path(__file__).with_name("greedy.py"))]
    words += [url.rpartition(":")[2], str(count), str(body), start.decode()]
    process = await asyncio.create_subprocess_exec(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    stack.push_async_callback(process.wait)
    stack.callback(process.stdin.close)
    return int(await process.stdout.readline())


async def serving(model: Path, folder: Path, engine: str, stack: AsyncExitStack, files: int) -> tuple[str, int]:
    """`proxy serve`, which may open this many files: its address and its process."""
    config, ready = folder / "proxy.toml", folder / "ready"
    config.write_text(f'pool = "pool.db"\n[engine]\nmodel = "{model}"\nurl = "{engine}"\n')

    def limited() -> None:
        die_with_parent()
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    words = [sys.executable, "-m", "proxy", "serve", str(config), "--ready-file", str(ready)]
    process = stack.enter_context(subprocess.Popen(words, preexec_fn=limited))
    stack.callback(process.kill)
    await asyncio.to_thread(wait_until, lambda: ready.exists() or process.poll() is not None)
    return msgspec.json.decode(ready.read_bytes())["url"], process.pid


async def served(http: aiohttp.ClientSession, url: str, key: str) -> bool:
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(f"{url}/v1/chat/completions", data=HI, headers=headers, timeout=TIMEOUT) as answer:
        await answer.read()
        return answer.status == 200


TIMEOUT = aiohttp.ClientTimeout(total=60)


def memory(pid: int) -> int:
    """The most bytes of memory that a process had at a time."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("files", [64, 256, 1024, 5000, 1 << 20])
def test_clients_and_engines_never_get_all_descriptors(files: int) -> None:
    places = Places.within(files, RequestLimits())
    assert 2 * places.attempts + places.silent + places.administrator <= files * 7 / 8 or files > 1024
    assert min(places.attempts, places.silent, places.administrator) >= 4 and places.silent <= 512


async def test_bodies_of_one_attempt_are_bounded(serve: Serve, wire: Callable[[str], Wire]) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"attempt_body_bytes": MIB})
    half, greedy = head("agent", MIB) + bytes(MIB // 2 - 100), wire(stand.url)
    readers = [await greedy.send(half) for _ in range(3)]
    # Which of the three comes last is for the proxy's loop to say, not for the order of their connections.
    [status], waiting = await first_status(readers)
    assert status == 429 and waiting == 2
    assert (await stand.chat(user("hi"), key="another"))["status"] == 200
    greedy.close()
    await until_served(stand, "agent")


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes of bodies that proxies have received, by attempt."""
    received, grow = Counter[int](), BodyBytes.grow

    def growing(ledger: BodyBytes, body: HeldBody, count: int) -> None:
        received[body.attempt_id] += count
        grow(ledger, body, count)

    monkeypatch.setattr(BodyBytes, "grow", growing)
    return received


async def test_bodies_of_all_attempts_are_bounded_at_the_cost_of_the_largest(
    serve: Serve, wire: Callable[[str], Wire], arrived: Counter[int]
) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"all_body_bytes": MIB})
    greedy = wire(stand.url)
    one = await greedy.send(head("greedy", MIB) + bytes(MIB // 2 - 100))
    await greedy.send(head("greedy", MIB) + bytes(MIB // 4))
    while arrived.total() < MIB // 2 - 100 + MIB // 4:  # the modest one is not to come first
        await asyncio.sleep(0.01)
    padding = msgspec.json.encode({"messages": [user("hi")], "user": "x" * (MIB // 2)})
    async with stand.post(padding, "modest") as answer:
        assert answer.status == 200
    assert await status_of(one) == 503
    greedy.close()
    async with stand.post(padding, "greedy") as answer:
        assert answer.status == 200


async def until_served(stand: Stand, key: str) -> None:
    while (await stand.chat(user("hi"), key=key))["status"] != 200:
        await asyncio.sleep(0.05)


async def test_nine_unread_streams_leave_places_to_the_rest_of_the_run(
    serve: Serve, wire: Callable[[str], Wire]
) -> None:
    stand = await serve(
        lambda prompt, ids: "ok" if "hi" in prompt else ScriptedReply("word " * 5000, seconds_per_token=0.1),
        max_calls=16, limits={"wait_seconds": 20},
    )  # fmt: skip
    (_, greedy), (_, modest) = attempts(stand.pool)
    body = msgspec.json.encode({"messages": [user("count")], "stream": True})
    await wire(stand.url).send(head(greedy, len(body)) + body, count=9)
    assert stand.engine is not None
    while stand.engine.calls < 4:
        await asyncio.sleep(0.01)
    for _ in range(20):
        assert (await stand.chat(user("hi"), key=modest))["status"] == 200


async def test_who_takes_nothing_is_cut_off_and_the_row_is_kept(tiny_model: Path, tmp_path: Path) -> None:
    config = ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=str(tmp_path / "pool.db"))
    script = lambda prompt, ids: ScriptedReply("word " * 3000)  # noqa: E731
    async with AsyncExitStack() as stack:
        engine = await listening(ScriptedEngine(script, ChatTemplate(tiny_model)).app(), stack)
        gateway = Gateway(config, engine, limits=RequestLimits(unread_seconds=1))
        url = await with_small_buffers(gateway, stack)
        body = msgspec.json.encode({"messages": [user("count")], "stream": True})
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            client.sendall(head("agent", len(body)) + body)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            stand = Stand(url, open_pool(config.pool), http)
            # The call goes on without its client, and a whole answer is marked after its commit.
            while not any(row.untrainable for row in stand.recorded()):
                await asyncio.sleep(0.05)
        [row] = stand.recorded()
        assert row.untrainable == Untrained(UntrainedReason.ABANDONED)
        assert len(row.sampled) > 0 and gateway.connections.cut == {"unread": 1} and not gateway.admission.inside


async def with_small_buffers(gateway: Gateway, stack: AsyncExitStack) -> str:
    """Serve a gateway whose answers the kernel does not keep for the client."""
    listener = stack.enter_context(socket.socket())
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    listener.bind(("127.0.0.1", 0))
    runner = gateway.runner(shutdown_seconds=1)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.SockSite(runner, listener).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


async def test_a_connection_that_says_nothing_is_closed(serve: Serve, wire: Callable[[str], Wire]) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"header_seconds": 0.4, "idle_seconds": 0.4})
    raw = wire(stand.url)
    assert await status_of(await raw.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")) == 0
    idle = await raw.send(head("agent", len(HI)) + HI)
    assert await status_of(idle) == 200
    assert await asyncio.wait_for(idle.read(), 60)  # its end comes, too


async def test_the_oldest_silent_connection_makes_room(serve: Serve, wire: Callable[[str], Wire]) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"silent_connections": 3})
    raw = wire(stand.url)
    oldest = await raw.send(b"")
    await raw.send(b"POST", count=3)
    assert await status_of(oldest) == 0
    assert (await stand.chat(user("hi")))["status"] == 200


async def test_connections_of_one_attempt_are_bounded(serve: Serve, wire: Callable[[str], Wire]) -> None:
    stand = await serve(lambda prompt, ids: "ok", limits={"attempt_connections": 2})
    raw, call = wire(stand.url), head("agent", len(HI)) + HI
    idle = [await raw.send(call) for _ in range(2)]
    assert [await status_of(reader) for reader in idle] == [200, 200]
    idle.append(await raw.send(call))
    assert await status_of(idle[-1]) == 200  # in the place of an idle one
    half = head("agent", 100) + b"{"
    await raw.send(half, count=2)
    for reader in idle:
        await reader.read()  # to its end: the other two have made room for the halves, which have both places now
    refused = await raw.send(call)
    assert await status_of(refused) == 429 and b"has 2 connections with calls at work" in await refused.read()
    assert (await stand.chat(user("hi"), key="another"))["status"] == 200
