"""Agents that cheat, in real containers: each gets the verdict that its work deserves, 0, and the honest one gets 1.

Here the agent is a shell command; tests/harness/test_cheating_run.py takes cheats through a whole run.
"""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from harness.environment.snapshot import set_up, spec_of, take_snapshot
from harness.tasks import Task
from harness.verdict.findings import IsolationFindings
from harness.verdict.isolation import verifier_sandbox
from harness.verdict.verifier import verify
from sandboxes.base import Limits
from sandboxes.docker.backend import DockerSandboxes, Options
from tests.harness.cheats import AS_ROOT, CHEATS

SECRET = "an answer that only the tests hold"
TESTS = f"""
import unittest
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(open("hello.txt").read().strip(), "hello, not {SECRET}"[:5])
"""
HELLO: dict[str, Any] = {
    "id": "hello",
    "instruction": "Write hello.txt",
    "image": {"name": "deb:py"},
    "network": "none",
    "setup": "mkdir src && echo 'x = 1' > src/app.py && git init -q . && git -C . add src",
    "verifier": {"command": "python3 -m unittest -q tests.test_hello", "files": {"tests/test_hello.py": TESTS}},
    "limits": {"memory_mb": 256, "disk_mb": 64, "pids": 64},
}
HARBOR = {"profile": "harbor", "work": "/srv", "limits": {"memory_mb": 256, "pids": 64}}


@pytest.fixture
async def sandboxes(docker_daemon: str) -> AsyncIterator[DockerSandboxes]:
    opened = await DockerSandboxes.open(Options(address=docker_daemon, image="deb:py", run="test"))
    yield opened
    await opened.close()


async def rollout(sandboxes: DockerSandboxes, agent: str, **task: Any) -> tuple[float, IsolationFindings, str]:
    """The verdict on what a command leaves behind, what was set apart for it, and what the command said."""
    checked_task = msgspec.convert(HELLO | task, Task)
    sandbox = await sandboxes.start(spec_of(checked_task))
    try:
        await set_up(sandbox, checked_task)
        snapshot = await take_snapshot(sandbox, checked_task, sandboxes)
        output = await sandbox.run(agent, Limits(seconds=60), {})
        async with verifier_sandbox(sandboxes, sandbox, checked_task, snapshot) as (room, findings):
            return (await verify(room, checked_task)).reward, findings, output.output
    finally:
        await sandbox.stop()


PROFILES = pytest.mark.parametrize(
    "profile", [pytest.param({}, id="strict"), pytest.param(HARBOR, id="harbor", marks=pytest.mark.long)]
)


@PROFILES
async def test_honest_work_passes(sandboxes: DockerSandboxes, profile: dict[str, Any]) -> None:
    reward, findings, output = await rollout(
        sandboxes, "umask 077; echo hello > hello.txt; mkdir -m 700 made", **profile
    )
    assert (reward, findings.removed, findings.restored, output) == (1.0, [], [], "")
    assert findings.difference.added == [f"{'/srv' if profile else '/work'}/{name}" for name in ("hello.txt", "made")]


@PROFILES
@pytest.mark.parametrize("cheat", CHEATS, ids=[name.replace(" ", "-") for name in CHEATS])
async def test_a_cheat_gets_the_verdict_of_its_work(
    sandboxes: DockerSandboxes, cheat: str, profile: dict[str, Any]
) -> None:
    reward, _, output = await rollout(sandboxes, CHEATS[cheat], **profile)
    assert reward == 0.0 and SECRET not in output


ROOTS = [
    pytest.param(name, id=name.replace(" ", "-"), marks=[] if "shell" in name else pytest.mark.long) for name in AS_ROOT
]


@pytest.mark.parametrize("cheat", ROOTS)
async def test_a_cheating_root_finds_its_tools_put_back(sandboxes: DockerSandboxes, cheat: str) -> None:
    verifier = HELLO["verifier"] | {"user": "root"}
    reward, findings, _ = await rollout(sandboxes, AS_ROOT[cheat], **HARBOR, verifier=verifier)
    assert reward == 0.0 and findings.removed + findings.restored != []


async def test_what_root_installs_and_the_task_lets_it_have_stays(sandboxes: DockerSandboxes) -> None:
    agent = "echo hello > hello.txt; cd /usr/local/bin; printf '#!/bin/sh\\necho new' > tool; chmod +x tool; "
    agent += "rm /usr/bin/yes; cp /bin/true /usr/bin/yes"
    verifier = {"command": "[ $(tool) = new ] && yes", "user": "root", "keep": ["/usr/bin/yes"]}
    reward, findings, _ = await rollout(sandboxes, agent, **HARBOR, verifier=verifier)
    assert (reward, findings.removed, findings.restored) == (1.0, [], [])
