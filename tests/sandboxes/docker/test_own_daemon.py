"""Sandboxes on daemons that the shared one is not: one that is killed, and one whose root is nobody outside."""

import asyncio
import os
import signal
import time
from dataclasses import replace

import pytest

from sandboxes.base import Image, Limits
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.daemon import DaemonError
from sandboxes.docker.shims import idle_shims
from tests.daemons import own_daemon
from tests.sandboxes.docker.conftest import HARBOR, SMALL, says

pytestmark = pytest.mark.long
BUSYBOX = Image(name="bb:1")


async def test_an_engine_that_is_killed_ends_what_runs_with_a_sentence_and_removes_it_when_it_is_back() -> None:
    with own_daemon() as daemon:
        sandboxes = await DockerSandboxes.open(Options(address=daemon.address))
        sandbox = await sandboxes.start(replace(SMALL, image=BUSYBOX))
        begun = asyncio.Event()
        running = asyncio.create_task(
            sandbox.run("echo begun; sleep 300", Limits(), {}, on_output=lambda piece: begun.set())
        )
        await asyncio.wait_for(begun.wait(), 60)
        daemon.kill()
        with pytest.raises(DaemonError, match="does not answer"):
            await asyncio.wait_for(running, 60)
        with pytest.raises(DaemonError, match="does not answer"):
            await sandboxes.start(replace(SMALL, image=BUSYBOX))
        with pytest.raises(DaemonError, match="does not answer"):
            await sandbox.stop()
        daemon.start()
        await sandbox.stop()
        assert daemon.say("ps", "--all", "--quiet") == ""
        await sandboxes.close()


async def test_shims_that_a_killed_engine_leaves_without_a_process_are_named() -> None:
    with own_daemon() as daemon:
        container = daemon.say("run", "--detach", "--network", "none", "bb:1", "sleep", "600")
        process = int(daemon.say("inspect", "--format", "{{.State.Pid}}", container))
        assert container not in {shim.container for shim in idle_shims(0)}
        daemon.kill()
        os.kill(process, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while container not in {shim.container for shim in idle_shims(0)}:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        (shim,) = (shim for shim in idle_shims(0) if shim.container == container)
        assert f"the shim of the container {container[:12]}" in str(shim) and f"kill -9 {shim.pid}" in str(shim)


async def test_root_of_a_harbor_sandbox_is_nobody_outside_where_the_engine_remaps_it() -> None:
    with own_daemon(remapped=True) as daemon:
        sandboxes = await DockerSandboxes.open(Options(address=daemon.address))
        assert "an unprivileged user outside" in sandboxes.promise
        for spec, user in ((HARBOR, "300000"), (SMALL, "310000")):
            sandbox = await sandboxes.start(replace(spec, image=BUSYBOX))
            running = asyncio.create_task(sandbox.run("sleep 300", Limits(), {}))
            while "sleep 300" not in (table := daemon.say("top", sandbox.container, "-eo", "pid,uid,args")):
                assert not running.done()
                await asyncio.sleep(0.1)
            assert {line.split()[1] for line in table.splitlines() if line.endswith("sleep 300")} == {user}
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await sandbox.write("f", "x")
            assert await says(sandbox, "cat f") == "x"
        await sandboxes.close()
