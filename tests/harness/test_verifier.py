"""The verdict: what is a reward, and what is a missing one."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.verdict.verifier import verify
from sandboxes.local.process import ProcessSandbox, ProcessSandboxes
from tests.harness.conftest import HELLO


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[ProcessSandbox]:
    sandbox = await ProcessSandboxes(tmp_path / "sandboxes").start()
    yield sandbox
    await sandbox.stop()


def judged(command: str, **verifier: Any) -> Task:
    return msgspec.convert(HELLO | {"verifier": {"command": command, **verifier}}, Task)


@pytest.mark.parametrize(
    "command, reward",
    [
        ("true", 1.0),
        ("exit 1", 0.0),
        ("echo 0.25 > $REWARD_FILE", 0.25),
        ("echo -3 > $REWARD_FILE", -3.0),
        ("echo 0.25 > $REWARD_FILE; exit 1", 0.0),
    ],
)
async def test_a_verdict(sandbox: ProcessSandbox, command: str, reward: float) -> None:
    assert (await verify(sandbox, judged(command))).reward == reward


@pytest.mark.parametrize(
    "command, detail",
    [
        ("echo broken; exit 2", "exit code 2, which is neither 0 nor 1: broken"),
        ("kill -9 $$", "exit code -9"),
        ("sleep 600", "ended by its timeout limit"),
        ("echo good > $REWARD_FILE", "no finite number: b'good"),
        ("echo nan > $REWARD_FILE", "no finite number: b'nan"),
        (": > $REWARD_FILE", "no finite number: b''"),
    ],
)
async def test_no_verdict_is_a_failure_never_a_zero(sandbox: ProcessSandbox, command: str, detail: str) -> None:
    with pytest.raises(AttemptFailed) as failed:
        await verify(sandbox, judged(command, timeout=1))
    assert failed.value.kind == "verifier" and detail in failed.value.detail


async def test_the_verifiers_files_replace_what_the_agent_put_there(sandbox: ProcessSandbox) -> None:
    await sandbox.write("check.sh", "exit 0")
    assert (await verify(sandbox, judged("sh check.sh", files={"check.sh": "exit 1"}))).reward == 0.0


async def test_a_sandbox_without_a_root_of_its_own_empties_nothing_of_this_machine(
    sandbox: ProcessSandbox, tmp_path: Path
) -> None:
    (tmp_path / "of this machine").mkdir()
    (tmp_path / "of this machine" / "file").touch()
    task = judged("true", directories={str(tmp_path / "of this machine"): str(tmp_path)})
    with pytest.raises(AttemptFailed, match="of this machine is this machine's in such a sandbox; use Docker"):
        await verify(sandbox, task)
    assert [path.name for path in (tmp_path / "of this machine").iterdir()] == ["file"]
