"""Fresh verdicts in containers: what steps share, what travels from outside of the work, and full disks."""

import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from harness.environment.snapshot import set_up, spec_of, take_snapshot
from harness.tasks import Task, parts_of
from harness.verdict.isolation import verifier_sandbox
from harness.verdict.verifier import verify
from sandboxes.base import Limits
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.leftovers import list_resources
from tests.harness.conftest import HELLO

CHECK = {"command": "test -e hello.txt", "timeout": 60}
BASE: dict[str, Any] = HELLO | {
    "network": "none", "verifier": CHECK, "limits": {"memory_mb": 256, "disk_mb": 64, "pids": 64},
}  # fmt: skip


@pytest.fixture
async def sandboxes(docker_daemon: str) -> AsyncIterator[DockerSandboxes]:
    opened = await DockerSandboxes.open(Options(address=docker_daemon, image="deb:py", run="test"))
    yield opened
    await opened.close()


async def rewards(sandboxes: DockerSandboxes, agent: str, **task: Any) -> list[float]:
    """The reward of each part, whose agents all run this command."""
    checked = msgspec.convert(BASE | task, Task)
    given = []
    sandbox = await sandboxes.start(spec_of(checked))
    try:
        for part in parts_of(checked):
            await set_up(sandbox, part.task)
            snapshot = await take_snapshot(sandbox, part.task, sandboxes)
            await sandbox.run(agent, Limits(seconds=60), {})
            judging = verifier_sandbox(sandboxes, sandbox, part.task, snapshot, before=part.before, more=part.more)
            async with judging as (room, _):
                given.append((await verify(room, part.task)).reward)
    finally:
        await sandbox.stop()
    return given


async def test_each_step_goes_on_with_the_agents_files_and_none_of_its_processes(sandboxes: DockerSandboxes) -> None:
    """The second step's set-up, in the agent's sandbox, fails where it would find a process of the first."""
    alone = "[ ! -e started ] || ! grep -qs [6]37 /proc/[0-9]*/cmdline"
    steps = [
        {
            "name": "one",
            "instruction": "?",
            "verifier": CHECK | {"command": "test -e started && test $(wc -l <log) = 1"},
        },
        {"name": "two", "instruction": "?", "setup": alone, "verifier": CHECK | {"command": "test $(wc -l <log) = 2"}},
        {"name": "none", "instruction": "?", "verifier": CHECK | {"command": "test -e ~agent/log"}},
    ]
    agent = "(setsid sleep 637 >/dev/null 2>&1 &); touch started; echo line >> log; echo line >> ~/log; test -s ~/log"
    assert await rewards(sandboxes, agent, steps=steps) == [1.0, 1.0, 0.0]
    mine = [one for one in await list_resources(sandboxes.daemon) if one.owner.pid == os.getpid() and not one.shared]
    assert mine == []


async def test_what_is_named_travels_from_everywhere_that_an_agent_can_write(sandboxes: DockerSandboxes) -> None:
    agent = "mkdir /tmp/out; echo 1 > /tmp/out/a; echo 2 > ~/b; ln -s /etc/shadow /tmp/out/c; echo 3 > hello.txt"
    command = "cat /tmp/out/a /home/agent/b && [ ! -e hello.txt ] && [ ! -L /tmp/out/c ] && [ -O /tmp/out/a ]"
    verifier = CHECK | {"command": command, "artifacts": [{"path": "/tmp/out"}, {"path": "~/b"}, {"path": "none"}]}
    assert await rewards(sandboxes, agent, verifier=verifier) == [1.0]


async def test_a_disk_that_the_agent_has_filled_does_not_keep_the_verifier_from_its_verdict(
    sandboxes: DockerSandboxes,
) -> None:
    assert await rewards(sandboxes, "cat /dev/zero > big; true") == [0.0]
