"""The relay as a process of its own, in both directions: nothing is lost, held back, or left over."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from proxy.engine.process import free_port
from sandboxes.network import relay

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Chain:
    """A server, a relay from its TCP port to a Unix socket, and another from that socket to TCP."""

    def __init__(self, directory: Path, stack: AsyncExitStack):
        self._socket, self._stack = directory / "s", stack
        self.relays: list[subprocess.Popen[bytes]] = []
        self.port = 0

    async def before(self, handler: Handler) -> None:
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        self._stack.callback(server.close)
        self._relay(f"unix:{self._socket}", f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}")
        self.port = free_port()
        self._relay(f"tcp:127.0.0.1:{self.port}", f"unix:{self._socket}")

    def _relay(self, listen: str, target: str) -> None:
        words = [sys.executable, "-I", "-S", relay.__file__, listen, target]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.relays.append(process)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"

    def descriptors(self) -> int:
        return sum(len(os.listdir(f"/proc/{process.pid}/fd")) for process in self.relays)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
async def chain(tmp_path: Path) -> AsyncIterator[Chain]:
    async with AsyncExitStack() as stack:
        yield Chain(tmp_path, stack)


async def answer_after_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Says how much came, and only when the client has sent all of it."""
    writer.write(b"%d" % len(await reader.read()))
    writer.close()


async def test_a_half_closed_connection_still_gets_its_answer(chain: Chain) -> None:
    await chain.before(answer_after_the_end)
    reader, writer = await chain.connect()
    writer.write(b"x" * 3_000_000)
    writer.write_eof()
    assert await reader.read() == b"3000000"
    writer.close()


async def test_a_slow_reader_holds_the_sender_back(chain: Chain) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for _ in range(1000):
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent += 100_000
        writer.close()

    await chain.before(flood)
    reader, writer = await chain.connect()
    await reader.readexactly(1)
    before = -1
    while before != sent:  # until nothing moves any more
        before = sent
        await asyncio.sleep(0.2)
    assert sent < 50_000_000 and _resident(chain) < 100 << 20
    assert len(await reader.read()) == 100_000_000 - 1
    writer.close()


def _resident(chain: Chain) -> int:
    return max(int(Path(f"/proc/{p.pid}/statm").read_text().split()[1]) * 4096 for p in chain.relays)


async def test_many_connections_at_once_leave_nothing_behind(chain: Chain) -> None:
    await chain.before(answer_after_the_end)
    idle = chain.descriptors()

    async def call(size: int) -> None:
        reader, writer = await chain.connect()
        writer.write(b"x" * size)
        writer.write_eof()
        assert await reader.read() == b"%d" % size
        writer.close()

    await asyncio.gather(*(call(number * 100) for number in range(300)))
    await _until(lambda: chain.descriptors() == idle)


async def test_who_stays_after_the_targets_end_is_let_go(chain: Chain) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    await chain.before(cut)
    idle = chain.descriptors()
    clients = await asyncio.gather(*(chain.connect() for _ in range(50)))
    assert await asyncio.gather(*(reader.read() for reader, _ in clients)) == [b""] * 50
    await _until(lambda: chain.descriptors() == idle)  # though no client has closed its end
    for _, writer in clients:
        writer.close()


async def test_who_never_reads_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy has cut such a connection long before, which the relay does not see while it waits for the reader."""
    monkeypatch.setattr(relay, "UNREAD_SECONDS", 0.2)

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                writer.write(b"x" * 100_000)
                await writer.drain()

    listening, place = asyncio.Event(), str(tmp_path / "s")
    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    target = f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    serving = asyncio.create_task(relay.serve(f"unix:{place}", target, listening.set))
    await listening.wait()
    before = len(os.listdir("/proc/self/fd"))
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(place)
    await asyncio.sleep(0.1)
    await _until(lambda: len(os.listdir("/proc/self/fd")) == before + 1)  # the silent one's own
    silent.close()
    serving.cancel()
    server.close()


async def test_connections_above_the_limit_are_ended_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_CONNECTIONS", 1)
    listening, place = asyncio.Event(), str(tmp_path / "s")
    server = await asyncio.start_server(answer_after_the_end, "127.0.0.1", 0)
    target = f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    serving = asyncio.create_task(relay.serve(f"unix:{place}", target, listening.set))
    await listening.wait()
    first = await asyncio.open_unix_connection(place)
    await asyncio.sleep(0.05)
    for taken, answer in ((await asyncio.open_unix_connection(place), b""), (first, b"0")):
        taken[1].write_eof()
        assert await taken[0].read() == answer
        taken[1].close()
    serving.cancel()
    server.close()


async def test_whoever_goes_away_is_missed_at_the_other_end(chain: Chain) -> None:
    gone = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"begun")
        assert await reader.read() == b""  # the client is gone
        gone.set()
        writer.transport.abort()

    await chain.before(hold)
    idle = chain.descriptors()
    reader, writer = await chain.connect()
    assert await reader.readexactly(5) == b"begun"
    writer.transport.abort()
    await asyncio.wait_for(gone.wait(), 60)
    await _until(lambda: chain.descriptors() == idle)
    chain.relays[0].kill()
    reader, writer = await chain.connect()
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)


async def _until(reached: Callable[[], bool], seconds: float = 60) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not reached():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)


def test_a_wrong_address_is_one_sentence() -> None:
    for words in (["udp:x", "unix:y"], ["unix:x", "8000"]):
        done = subprocess.run([sys.executable, "-I", "-S", relay.__file__, *words], capture_output=True, text=True)
        assert done.returncode == 1 and "an address is tcp:HOST:PORT or unix:PATH" in done.stderr
