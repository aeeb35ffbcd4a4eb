"""A sandbox that is halted from outside: what it holds is read and goes on to the next start, and nothing runs on."""

import asyncio
import io
import tarfile
from dataclasses import replace
from typing import Any

import pytest
from aiodocker.containers import DockerContainer

from sandboxes.base import Image, SandboxError
from sandboxes.docker.backend import DockerSandboxes
from sandboxes.docker.container import freezing
from sandboxes.docker.container.sandbox import DockerSandbox
from sandboxes.docker.leftovers import list_resources
from tests.sandboxes.docker.conftest import HARBOR, SMALL, says, unpausable

HIDDEN = """
python3 -c '
import os, threading, time
if os.fork(): os._exit(0)
os.setsid()
def go():
    while True:
        open("/work/alive", "a").write("x"); time.sleep(0.01)
threading.Thread(target=go).start()
import ctypes; ctypes.CDLL(None).pthread_exit(None)
' >/dev/null 2>&1
while [ ! -s alive ]; do sleep 0.05; done
"""
"""Leaves a process whose first thread has exited: the kernel lists it as a zombie, and it goes on writing."""


async def packed(sandbox: DockerSandbox, path: str, limit: int = 1 << 22) -> dict[str, tarfile.TarInfo] | None:
    archive = io.BytesIO()
    if not await sandbox.pack(path, archive, limit):
        return None
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        return {member.name.partition("/")[2]: member for member in tar}


async def test_a_frozen_sandbox_is_read_by_the_daemon_and_changes_no_more(sandboxes: DockerSandboxes) -> None:
    strict = await sandboxes.start(SMALL)
    await says(strict, HIDDEN + "mkdir -p a/b; echo hello > a/b/file; chmod 000 a/b/file; ln -s file a/b/link")
    await strict.freeze()
    await strict.freeze()
    first, second = await packed(strict, "."), await packed(strict, "/work")
    assert first is not None and second is not None
    assert first["alive"].size == second["alive"].size > 0
    assert sorted(first) == ["", "a", "a/b", "a/b/file", "a/b/link", "alive"]
    assert (first["a/b/file"].size, first["a/b/link"].linkname) == (6, "file")
    only = await packed(strict, "a/b/file")
    assert only is not None and list(only) == [""]
    assert await packed(strict, "a/c") is None
    with pytest.raises(SandboxError, match="holds more than 0 MB"):
        await packed(strict, ".", 1000)
    with pytest.raises(SandboxError, match="nobody can write to /etc/passwd"):
        await packed(strict, "/etc/passwd")
    await strict.stop()


async def test_an_agents_links_lead_nowhere_in_a_strict_sandbox(strict: DockerSandbox) -> None:
    await says(strict, "ln -s /etc out; mkdir in; ln -s /etc/passwd in/out")
    assert [await packed(strict, path) for path in ("out", "out/passwd", "in/out")] == [None] * 3


@pytest.mark.parametrize("profile", ["strict", "harbor"])
async def test_a_restart_ends_everything_and_keeps_the_files(sandboxes: DockerSandboxes, profile: str) -> None:
    sandbox = await sandboxes.start(SMALL if profile == "strict" else HARBOR)
    files = f"mkdir -p /work; cd /work; {HIDDEN} echo kept > /work/kept; echo home > ~/home; echo t > /tmp/t"
    await says(sandbox, files)
    await sandbox.freeze()
    await sandbox.restart()
    assert await says(sandbox, "cat /work/kept ~/home /tmp/t") == "kept\nhome\nt"
    assert await says(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '[t]hreading' || true") == "0"
    assert [one for one in await list_resources(sandbox.daemon) if one.purpose == "holder"] == []
    await sandbox.stop()


@pytest.mark.parametrize("profile", ["strict", "harbor"])
async def test_a_sandbox_that_cannot_be_paused_is_killed_and_read(sandboxes: DockerSandboxes, profile: str) -> None:
    sandbox = await sandboxes.start(SMALL if profile == "strict" else HARBOR)
    await says(sandbox, "mkdir -p /work; echo here > /work/file")
    sandbox.daemon.container = unpausable(sandbox.daemon.container)  # type: ignore[method-assign, assignment]
    await sandbox.freeze()
    assert not (await sandbox.daemon.container(sandbox.container).show())["State"]["Running"]
    work = await packed(sandbox, "/work")
    assert work is not None and work["file"].size == 5
    await sandbox.restart()
    assert await says(sandbox, "cat /work/file") == "here"
    await sandbox.freeze()
    await sandbox.stop()
    assert [one for one in await list_resources(sandbox.daemon) if one.name.startswith(sandbox.container)] == []


async def test_a_killed_container_that_does_not_end_is_an_error(
    strict: DockerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a process that the kernel cannot end: the daemon then answers nothing."""
    monkeypatch.setattr(DockerContainer, "kill", DockerContainer.show)  # it goes on
    monkeypatch.setattr(freezing, "KILL_SECONDS", 0.2)
    async with asyncio.timeout(60):
        with pytest.raises(SandboxError, match="was killed and has not ended after"):
            await strict.restart()
    left = [one.purpose for one in await list_resources(strict.daemon) if one.name.startswith(strict.container)]
    assert left == ["sandbox"]


async def test_what_is_thawed_goes_on(strict: DockerSandbox) -> None:
    await says(strict, HIDDEN)
    await strict.freeze()
    await strict.thaw()
    size = int(await says(strict, "wc -c < alive"))
    await says(strict, f"while [ $(wc -c < alive) -le {size} ]; do sleep 0.05; done")


async def test_what_the_daemon_takes_for_paused_for_a_moment_is_tried_again(strict: DockerSandbox) -> None:
    """Its events come late on a busy machine: a command after a thaw was refused in one of 6,459 tests."""
    container = strict.daemon.container(strict.container)
    await container.pause()
    running = asyncio.create_task(says(strict, "echo here"))
    await asyncio.sleep(0.5)
    assert not running.done()
    await container.unpause()
    assert await running == "here"


async def test_a_container_that_the_daemon_takes_for_running_for_a_moment_is_thawed(strict: DockerSandbox) -> None:
    await strict.freeze()
    looks, show = [False, False], DockerContainer.show

    async def late(self: DockerContainer) -> dict[str, Any]:
        state = await show(self)
        return state | {"State": state["State"] | {"Paused": looks.pop() if looks else state["State"]["Paused"]}}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DockerContainer, "show", late)
        await strict.thaw()
    assert looks == [] and await says(strict, "echo here") == "here"


async def test_a_sandbox_of_busybox_restarts_too(sandboxes: DockerSandboxes) -> None:
    sandbox = await sandboxes.start(replace(SMALL, image=Image(name="bb:1")))
    await says(sandbox, "echo x > x")
    await sandbox.restart()
    assert await says(sandbox, "cat x; id -u; touch y") == "x\n10000"
    await sandbox.stop()
    left = [one.kind for one in await list_resources(sandbox.daemon) if one.name.startswith(sandbox.container)]
    assert left == []


async def test_a_strict_sandbox_whose_main_process_has_ended_holds_nothing_to_judge(
    sandboxes: DockerSandboxes,
) -> None:
    for spec in (SMALL, HARBOR):
        sandbox = await sandboxes.start(spec)
        await sandbox.daemon.container(sandbox.container).kill()
        await sandbox.daemon.container(sandbox.container).wait()
        if spec is SMALL:
            with pytest.raises(SandboxError, match="has ended, and the files of the sandbox with it"):
                await sandbox.freeze()
        else:
            await sandbox.freeze()
            assert await packed(sandbox, "/etc/passwd") is not None
        await sandbox.stop()
