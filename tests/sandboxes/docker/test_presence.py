"""A daemon that goes away or hangs, and comes back: seen, waited for, and not counted as anybody's time.

The daemon is the tests' own behind a relay, so that it can be gone for one client without being gone for all.
"""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import Limits, SandboxError
from sandboxes.docker import presence
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.daemon import DaemonError
from sandboxes.network import relay
from tests.sandboxes.docker.conftest import SMALL

SPEC = replace(SMALL, memory_mb=None, disk_mb=16)


class Way:
    """The only way to the daemon."""

    def __init__(self, place: Path, daemon: str):
        self.address = f"unix://{place}/way.sock"
        self._command = [sys.executable, "-I", "-S", relay.__file__, f"unix:{place}/way.sock"]
        self._command.append(daemon.replace("unix://", "unix:"))
        self.open()

    def open(self) -> None:
        self._relay = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None and self._relay.stdout.readline() == "ready\n"

    def send(self, what: signal.Signals) -> None:
        self._relay.send_signal(what)

    def close(self) -> None:
        self._relay.kill()
        self._relay.communicate()


@pytest.fixture
def way(docker_daemon: str, tmp_path: Path) -> Iterator[Way]:
    way = Way(tmp_path, docker_daemon)
    yield way
    way.send(signal.SIGCONT)
    way.close()


async def test_a_daemon_that_goes_is_missed_at_once_and_waited_for(way: Way) -> None:
    sandboxes = await DockerSandboxes.open(Options(address=way.address, image="deb:py", run="test"))
    before = time.monotonic()
    sandbox = await sandboxes.start(SPEC)
    assert not await sandboxes.was_away(before) and sandboxes.away == ""
    running = asyncio.create_task(sandbox.run("sleep 600", Limits(), {}))
    await asyncio.sleep(0)
    way.close()
    with pytest.raises(DaemonError):
        await running
    assert await sandboxes.was_away(before) and "has been away for" in sandboxes.away
    with pytest.raises(DaemonError):
        await sandbox.stop()
    waiting = asyncio.create_task(sandboxes.until_there())
    way.open()
    await asyncio.wait_for(waiting, 120)
    assert sandboxes.away == "" and sandboxes.away_seconds > 0
    assert await sandboxes.was_away(before) and not await sandboxes.was_away(time.monotonic())
    other = await sandboxes.start(SPEC)  # removes what could not be removed before
    names = [container._container["Names"][0] for container in await sandboxes.daemon.docker.containers.list(all=True)]
    assert f"/{sandbox.container}" not in names
    await other.stop()
    await sandboxes.close()


@pytest.mark.long
async def test_the_time_of_a_command_stands_still_while_the_daemon_hangs(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "SILENT_SECONDS", 3.0)
    sandboxes = await DockerSandboxes.open(Options(address=way.address, image="deb:py", run="test"))
    sandbox = await sandboxes.start(SPEC)
    begun = asyncio.Event()
    command = "echo begun; while ! test -e go; do sleep 0.1; done"
    running = asyncio.create_task(sandbox.run(command, Limits(seconds=20), {}, on_output=lambda _: begun.set()))
    await begun.wait()
    way.send(signal.SIGSTOP)
    while sandboxes.away_seconds < 25:  # longer than the command may take
        await asyncio.sleep(0.1)
    assert not running.done()
    way.send(signal.SIGCONT)
    await sandbox.write("go", "")
    result = await running
    assert result.ended == "exit" and result.seconds < 20
    await sandbox.stop()
    await sandboxes.close()


async def test_a_daemon_that_stays_away_ends_the_wait_with_a_sentence(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "OUTAGE_SECONDS", 0.5)
    sandboxes = await DockerSandboxes.open(Options(address=way.address, image="deb:py", run="test"))
    way.close()
    with pytest.raises(SandboxError, match=r"the Docker daemon at unix://.* has been away for \d+ s; start it"):
        await sandboxes.until_there()
    way.open()
    await sandboxes.close()
