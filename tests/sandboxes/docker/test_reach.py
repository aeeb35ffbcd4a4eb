"""A full network is the Internet: not this machine, no neighbour, no private range and no metadata, unless named."""

import asyncio
import json
import os
import secrets
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import Image, ImageError, SandboxError
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.container.sandbox import DockerSandbox
from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.image import images
from sandboxes.docker.isolation.reach import Router, own_addresses
from tests.daemons import command_lines, own_daemon
from tests.sandboxes.docker.conftest import HARBOR, SMALL, says

TRY = """
import errno, json, socket, sys
def answer(way, host, port):
    try:
        with socket.socket(socket.AF_INET, way) as tried:
            tried.settimeout(5)
            tried.connect((host, port))
        return "works"
    except TimeoutError:
        return "silence"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
print(json.dumps([answer(*one) for one in json.loads(sys.argv[1])]))
"""
TCP, UDP = 1, 2
REFUSED = "EACCES"


@pytest.fixture
async def restricted(docker_daemon: str) -> AsyncIterator[DockerSandboxes]:
    """The back end with a router, whose containers have Debian's Python."""
    daemon = await DockerDaemon.open(docker_daemon)
    router = Router(daemon=daemon, python="/usr/bin/python3", image="deb:py")
    opened = await DockerSandboxes.open(Options(address=docker_daemon, image="deb:py", run="test", router=router))
    yield opened
    await opened.close()
    await daemon.close()


@asynccontextmanager
async def listener() -> AsyncIterator[int]:
    """A port that this machine listens at under all its addresses."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def answers(sandbox: DockerSandbox, *tries: tuple[int, str, int]) -> list[str]:
    return json.loads(await says(sandbox, f"python3 -c '{TRY}' '{json.dumps(tries)}'"))


async def gateway(sandbox: DockerSandbox) -> str:
    """The address of the daemon's host on the bridge that the sandbox is connected to."""
    details = await sandbox.daemon.container(sandbox.container).show()
    return details["NetworkSettings"]["Networks"]["bridge"]["Gateway"]


async def test_a_full_network_reaches_nothing_near_or_private(restricted: DockerSandboxes) -> None:
    neighbour = await restricted.start(replace(HARBOR, network="full"))
    address = await says(neighbour, "hostname -I")
    sandbox = await restricted.start(replace(SMALL, network="full"))
    here = await gateway(sandbox)
    async with listener() as port:
        near = [(TCP, one, port) for one in {here, *(one for one in own_addresses() if "." in one)}]
        assert await answers(sandbox, *near) == [REFUSED] * len(near)
        near = [(TCP, "169.254.169.254", 80), (TCP, "10.0.0.1", 80), (TCP, "192.168.1.1", 80), (TCP, address, 80)]
        assert await answers(sandbox, *near) == [REFUSED] * 4
        assert await answers(sandbox, (UDP, "192.0.32.8", 53), (TCP, "127.0.0.1", 1)) == ["works", "ECONNREFUSED"]
        bound = 'import socket; socket.socket().setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")'
        assert "PermissionError" in await says(sandbox, f"python3 -c '{bound}' 2>&1 || true")
        named = await restricted.start(replace(SMALL, network="full", reach=(here, "10.0.0.0/8")))
        results = await answers(named, (TCP, here, port), (UDP, "10.0.0.1", 53), (TCP, "169.254.169.254", 80))
        assert results == ["works", "works", REFUSED]
    for one in (neighbour, sandbox, named):
        await one.stop()


async def test_a_verifiers_network_is_restricted_as_well(restricted: DockerSandboxes) -> None:
    sandbox = await restricted.start(SMALL)
    await sandbox.allow_network()
    async with listener() as port:
        here = await gateway(sandbox)
        assert await answers(sandbox, (TCP, here, port)) == [REFUSED]
        await sandbox.restart()  # into a new name space
        assert await answers(sandbox, (TCP, here, port), (UDP, "192.0.32.8", 53)) == [REFUSED, "works"]
    await sandbox.stop()


@pytest.mark.long
async def test_a_root_that_is_nobody_outside_is_restricted_as_well(docker_daemon: str) -> None:
    with own_daemon(remapped=True, bridge=True) as own:
        image = subprocess.run(["docker", "save", "deb:py"], capture_output=True, check=True).stdout
        loaded = subprocess.run([*own.docker, "load"], input=image, capture_output=True)
        # seen in two runs of all tests: an unexpected EOF
        assert loaded.returncode == 0, (loaded.stderr, len(image), (own.home / "log").read_text()[-3000:])
        daemon = await DockerDaemon.open(own.address)
        router = Router(daemon=daemon, python="/usr/bin/python3", image="deb:py")
        sandboxes = await DockerSandboxes.open(Options(address=own.address, image="deb:py", router=router))
        sandbox = await sandboxes.start(replace(HARBOR, network="full"))
        tries = [(TCP, await gateway(sandbox), 80), (TCP, "169.254.169.254", 80), (UDP, "192.0.32.8", 53)]
        assert await answers(sandbox, *tries) == [REFUSED, REFUSED, "works"]
        await sandboxes.close()
        await daemon.close()


async def test_a_build_has_a_sandboxs_limits(restricted: DockerSandboxes, tmp_path: Path) -> None:
    (tmp_path / "try.py").write_text(TRY)
    async with listener() as port:
        near = next(one for one in own_addresses() if "." in one)
        tries = json.dumps([(TCP, near, port), (TCP, "169.254.169.254", 80)])
        check = f"python3 /try.py '{tries}' | grep -x '\\[\"{REFUSED}\", \"{REFUSED}\"\\]'"
        lines = f"FROM deb:py\nCOPY try.py /\nRUN echo {os.urandom(8).hex()} && {check}\n"
        (tmp_path / "Dockerfile").write_text(lines)
        await restricted.images.base(replace(SMALL, image=Image(context=tmp_path)))
    (tmp_path / "Dockerfile").write_text("FROM deb:py\nRUN python3 -c 'bytearray(300 << 20)'\n")
    with pytest.raises(ImageError, match="cannot be built"):
        await restricted.images.base(replace(SMALL, image=Image(context=tmp_path)))
    left = await restricted.daemon.docker.containers.list(all=True, filters='{"label": ["blackforge.kind=routes"]}')
    assert not [one for one in left if str(os.getpid()) == one._container["Labels"]["blackforge.pid"]]


@pytest.mark.long
async def test_a_build_that_takes_too_long_is_given_up(
    restricted: DockerSandboxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "BUILD_SECONDS", 5.0)
    named = f"sleep {secrets.randbits(30) + 600}"
    (tmp_path / "Dockerfile").write_text(f"FROM deb:py\nRUN {named}\n")
    with pytest.raises(ImageError, match="was not built in 5 s; build it by hand"):
        await restricted.images.base(replace(SMALL, image=Image(context=tmp_path)))
    async with asyncio.timeout(120):  # the daemon ends what it was building
        while any(named in line for line in command_lines()):
            await asyncio.sleep(0.1)


def test_a_machine_whose_addresses_cannot_be_read_gives_nobody_a_network(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="addresses cannot be read .*; run where .* can be read, or leave out tasks"):
        own_addresses(tmp_path)
    routes = Path("/proc/net/fib_trie").read_bytes()  # once, as addresses come and go with others' networks
    (tmp_path / "fib_trie").write_bytes(routes)
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "fib_trie").write_bytes(routes)
    (tmp_path / "both" / "if_inet6").write_text(f"fd{2:030x} 04 40 00 82     eth0\n")
    both = own_addresses(tmp_path / "both")
    assert own_addresses(tmp_path) == [one for one in both if "." in one]  # a kernel without IPv6
    assert own_addresses(tmp_path) and "fd00::2" in both
    (tmp_path / "if_inet6").mkdir()
    with pytest.raises(SandboxError, match="cannot be read"):
        own_addresses(tmp_path)
