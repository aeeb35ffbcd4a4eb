"""A daemon that goes away or hangs, and comes back: seen, waited for, and not counted as anybody's time.

The daemon is the tests' own behind a relay, so that it can be gone for one client without being gone for all.
"""

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.base import Limits, SandboxError
from sandboxes.docker import presence
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.container.freezing import holder_of
from sandboxes.docker.daemon import DaemonError
from tests.daemons import Way
from tests.sandboxes.docker.conftest import SMALL, unpausable

SPEC = replace(SMALL, memory_mb=None, disk_mb=16)


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
    assert sandbox.container not in await names(sandboxes)
    await other.stop()
    await sandboxes.close()


async def test_a_halted_sandbox_that_could_not_be_removed_goes_later_with_its_holder(way: Way) -> None:
    sandboxes = await DockerSandboxes.open(Options(address=way.address, image="deb:py", run="test"))
    sandbox = await sandboxes.start(SPEC)
    there = sandboxes.daemon.container
    sandboxes.daemon.container = unpausable(there)  # type: ignore[method-assign, assignment]
    await sandbox.freeze()
    sandboxes.daemon.container = there  # type: ignore[method-assign]
    assert {sandbox.container, holder_of(sandbox.container)} <= await names(sandboxes)
    way.close()
    with pytest.raises(DaemonError):
        await sandbox.stop()
    way.open()
    await asyncio.wait_for(sandboxes.until_there(), 120)
    other = await sandboxes.start(SPEC)
    assert [name for name in await names(sandboxes) if name.startswith(sandbox.container)] == []
    await other.stop()
    await sandboxes.close()


async def names(sandboxes: DockerSandboxes) -> set[str]:
    containers = await sandboxes.daemon.docker.containers.list(all=True)
    return {container._container["Names"][0].lstrip("/") for container in containers}


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
