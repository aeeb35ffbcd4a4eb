"""The way of containers to a server of this machine: by its socket, or by one relay for all of them."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from sandboxes.base import Limits, SandboxError, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.labels import KIND, PID
from sandboxes.docker.network import Channel, Runtime, address_for
from sandboxes.gc import SearchScope, remove_leftovers

SMALL = Spec(memory_mb=256, disk_mb=64)
CALL = "import socket; s = socket.create_connection(('127.0.0.1', 8311)); s.sendall(b'x'); print(s.recv(9).decode())"
ROOT = Path(__file__).parent.parent.parent.parent


@asynccontextmanager
async def opened(address: str, reach: str) -> AsyncIterator[tuple[DockerSandboxes, Channel]]:
    async with AsyncExitStack() as stack:
        daemon = await DockerDaemon.open(address)
        stack.push_async_callback(daemon.close)
        channel = Channel(daemon=daemon, runtime=Runtime(python="python3", image="deb:py"), address=reach, run="test")
        stack.push_async_callback(channel.close)
        sandboxes = await DockerSandboxes.open(Options(address=address, image="deb:py", suppliers=[channel]))
        stack.push_async_callback(sandboxes.close)
        yield sandboxes, channel


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Of a server on every address of this machine, which answers `hello` to whatever comes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            writer.write(b"hello")
        writer.close()

    async with await asyncio.start_server(answer, "0.0.0.0", 0) as server:
        yield server.sockets[0].getsockname()[1]


def relays(kind: str) -> list[str]:
    """Those of this process."""
    labels = [f"--filter=label={KIND}=relay", f"--filter=label={PID}={os.getpid()}"]
    given = ["docker", kind, "ls", "-q", *(["-a"] if kind == "container" else []), *labels]
    return subprocess.run(given, capture_output=True, text=True, check=True).stdout.split()


async def test_all_sandboxes_share_one_relay_that_goes_with_them(docker_daemon: str, port: int) -> None:
    async with opened(docker_daemon, f"host.docker.internal:{port}") as (sandboxes, _):
        both = await asyncio.gather(sandboxes.start(SMALL), sandboxes.start(SMALL))
        for sandbox in both:
            result = await sandbox.run(f'python3 -I -S -c "{CALL}"', Limits(), {})
            assert result.output == "hello\n"
        assert len(relays("container")) == len(relays("volume")) == 1
    assert relays("container") == relays("volume") == []


async def test_a_proxy_that_a_relay_cannot_reach_is_one_sentence(docker_daemon: str) -> None:
    async with opened(docker_daemon, "host.docker.internal:1") as (sandboxes, _):
        with pytest.raises(SandboxError, match="tcp:host.docker.internal:1 cannot be reached"):
            await sandboxes.start(SMALL)
    assert relays("container") == relays("volume") == []


async def test_a_sandbox_without_a_model_needs_no_relay(docker_daemon: str) -> None:
    async with opened(docker_daemon, "") as (sandboxes, _):
        sandbox = await sandboxes.start(Spec(memory_mb=256, disk_mb=64, network="none"))
        assert sandbox.model_url == ""
        with pytest.raises(SandboxError, match="start it with --sandbox-socket PATH"):
            await sandboxes.start(SMALL)


async def test_addresses_as_containers_see_them(docker_daemon: str) -> None:
    daemon = await DockerDaemon.open(docker_daemon)
    try:
        assert address_for(daemon, "http://0.0.0.0:80") == "host.docker.internal:80"
        assert address_for(daemon, "http://10.1.2.3:80") == "10.1.2.3:80"
        daemon.address = "tcp://127.0.0.1:2375"
        assert address_for(daemon, "http://0.0.0.0:80") == "127.0.0.1:80"
    finally:
        await daemon.close()


KILLED = """
import asyncio, os, sys
from sandboxes.base import Spec
from tests.sandboxes.docker.test_network import opened

async def main():
    async with opened(sys.argv[1], f"host.docker.internal:{sys.argv[2]}") as (sandboxes, channel):
        await sandboxes.start(Spec(memory_mb=256, disk_mb=64))
        print((await channel._relayed()).container, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.long
async def test_kill_9_leaves_a_relay_that_is_reaped(docker_daemon: str, port: int) -> None:
    words = [sys.executable, "-c", KILLED, docker_daemon, str(port)]
    owner = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    relay = (await owner.stdout.readline()).decode().strip()
    owner.kill()
    await owner.communicate()
    removed = await asyncio.to_thread(remove_leftovers, SearchScope(daemons=[docker_daemon]))
    assert {(thing.kind, thing.name) for thing in removed.resources} >= {("container", relay), ("volume", relay)}
