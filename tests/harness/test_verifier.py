"""The verdict: what is a reward, and what is a missing one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.verdict.verifier import verify
from sandboxes.base import Result, SandboxError
from sandboxes.local.process import ProcessSandbox
from tests.harness.conftest import HELLO


def judged(command: str, **verifier: Any) -> Task:
    return msgspec.convert(HELLO | {"verifier": {"command": command, **verifier}}, Task)


@pytest.mark.parametrize(
    "command, reward",
    [
        ("true", 1.0),
        ("exit 1", 0.0),
        ("echo 0.25 > $REWARD_FILE", 0.25),
        ("echo 1.0 > $REWARD_FILE", 1.0),
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
        ("echo good > $REWARD_FILE", "no finite number: b'good"),
        ("echo nan > $REWARD_FILE", "no finite number: b'nan"),
        (": > $REWARD_FILE", "no finite number: b''"),
        ("echo 100 > $REWARD_FILE", "the reward 100 is outside of 0 to 1; if the task means it, set verifier.range"),
        ("echo -0.1 > $REWARD_FILE", "the reward -0.1 is outside of 0 to 1"),
    ],
)
async def test_no_verdict_is_a_failure_never_a_zero(sandbox: ProcessSandbox, command: str, detail: str) -> None:
    with pytest.raises(AttemptFailed) as failed:
        await verify(sandbox, judged(command))
    assert failed.value.kind == "verifier" and detail in failed.value.detail


async def test_no_verdict_in_time_is_a_failure(sandbox: ProcessSandbox) -> None:
    with pytest.raises(AttemptFailed, match="ended by its timeout limit") as failed:
        await verify(sandbox, judged("sleep 600", timeout=1))
    assert failed.value.kind == "verifier"


async def test_a_task_may_declare_other_rewards(sandbox: ProcessSandbox) -> None:
    task = judged("echo -3 > $REWARD_FILE", range=[-5, 10])
    assert (await verify(sandbox, task)).reward == -3.0


CALC = """
import os, sys, time
print("imported")
def add(a, b): return a + b
def half(a): return a / 3 * 1.5
def lie(*args): os._exit(0)
def shout(): os.write(1, b"true"); os._exit(0)
def slow(): time.sleep(600)
def huge(): return 10 ** 400
def cyclic(): value = []; value.append(value); return value
if __name__ == "__main__":
    sys.stderr.write("noise"); print(sum(map(int, sys.stdin.read().split())))
"""


async def test_cases_are_judged_by_what_comes_out(sandbox: ProcessSandbox) -> None:
    await sandbox.write("calc.py", CALC)
    right = [
        {"call": "calc:add", "args": [[1], ["x"]], "returns": [1, "x"]},
        {"call": "calc:half", "args": [0.3], "returns": 0.15},
        {"command": "python3 calc.py", "input": "1 2\n3", "output": "imported\n6\n"},
        {"command": "exit 3", "exit_code": 3, "name": "ends"},
    ]
    wrong = [
        {"call": "calc:add", "args": [1, 1], "returns": 3},
        {"call": "calc:add", "args": [0, 1], "returns": True},
        {"call": "calc:lie", "returns": True},
        {"call": "calc:slow", "timeout": 1},
        {"call": "calc:cyclic", "returns": []},
        {"call": "calc:huge", "returns": 0.5},
        {"call": "calc:missing"},
        {"call": "calc:shout", "returns": True},
        {"command": "echo 5; exit 1", "output": "5"},
        {"command": "sleep 637 & echo 6", "output": "7", "weight": 3},
    ]
    verdict = await verify(sandbox, judged("", cases=right + wrong))
    assert list(verdict.parts.values()) == [1.0] * 4 + [0.0] * 10
    assert verdict.reward == 4 / 16 and verdict.parts["case:ends"] == 1.0


async def test_a_case_whose_output_lost_its_end_is_neither_right_nor_wrong(
    sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sandbox.run

    async def lose(*arguments: Any) -> Result:
        return replace(await run(*arguments), output="", cut=True)

    monkeypatch.setattr(sandbox, "run", lose)
    fives = judged("", cases=[{"command": "echo 5 && echo ran >> runs", "output": "5"}])
    with pytest.raises(SandboxError, match="the end of a case's output was lost, so nobody knows whether it is right"):
        await verify(sandbox, fives)
    assert await sandbox.read("runs") == b"ran\n" * 3

    async def lose_once(*arguments: Any) -> Result:
        monkeypatch.setattr(sandbox, "run", run)
        return await lose(*arguments)

    monkeypatch.setattr(sandbox, "run", lose_once)
    assert (await verify(sandbox, fives)).reward == 1
    assert await sandbox.read("runs") == b"ran\n" * 5


async def test_what_must_come_out_never_enters_the_sandbox(sandbox: ProcessSandbox) -> None:
    spy = "import os, re, subprocess\ndef look():\n"
    spy += "    return subprocess.run('cat /proc/[0-9]*/cmdline ~/* ~/.* $PWD/*; env', shell=True, capture_output=True)"
    await sandbox.write("spy.py", spy + ".stdout.decode(errors='replace').count('SECR' + 'ET')")
    case = {"call": "spy:look", "returns": "SECRET"}
    again = {"call": "spy:look", "returns": 0}
    assert (await verify(sandbox, judged("", cases=[case, again]))).reward == 0.5


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
