"""What an agent leaves for the verifier to stumble over: in the process sandbox, where only order and names protect."""

import asyncio
import gc
import gzip
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.environment.file_manifest import MAX_FILES
from harness.environment.snapshot import Snapshot, take_snapshot
from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.verdict.findings import IsolationFindings, write_findings
from harness.verdict.isolation import verifier_sandbox
from harness.verdict.room import safe_path
from harness.verdict.verifier import verify
from sandboxes.base import Limits, SandboxError
from sandboxes.local.process import ProcessSandbox, ProcessSandboxes
from tests.harness.conftest import HELLO


def task(command: str, **verifier: Any) -> Task:
    return msgspec.convert(HELLO | {"verifier": {"command": command, **verifier}}, Task)


async def judged(
    sandboxes: ProcessSandboxes, sandbox: ProcessSandbox, task: Task, agent: str, before: str = "true"
) -> tuple[float, IsolationFindings]:
    """The verdict after an agent that ran this command, and what was set apart for it."""
    await sandbox.run(before, Limits(), {})
    snapshot = await take_snapshot(sandbox, task, sandboxes)
    result = await sandbox.run(agent, Limits(), {})
    assert result.exit_code == 0, result.output
    async with verifier_sandbox(sandboxes, sandbox, task, snapshot) as (room, findings):
        return (await verify(room, task)).reward, findings


RUNS_TESTS = "python3 -m unittest -q check_it 2>/dev/null"
TESTS = {"check_it.py": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertTrue(False)\n"}
LIAR = "import os; os._exit(0)"


@pytest.mark.parametrize(
    "plant, where",
    [
        (f"echo '{LIAR}' > unittest.py", "unittest.py"),
        (f"mkdir unittest && echo '{LIAR}' > unittest/__init__.py && touch unittest/__main__.py", "unittest"),
    ],
)
async def test_a_planted_test_runner_is_removed(
    sandboxes: ProcessSandboxes, sandbox: ProcessSandbox, plant: str, where: str
) -> None:
    reward, findings = await judged(sandboxes, sandbox, task(RUNS_TESTS, files=TESTS), plant)
    assert reward == 0.0 and findings.removed == [f"{sandbox.work}/{where}"]


@pytest.mark.long
@pytest.mark.parametrize("user", ["verifier", "root"])
async def test_a_planted_test_runner_does_not_hide_among_many_files(user: str) -> None:
    """More than a manifest holds. As root, files anywhere in the home could steer it: there is no verdict then."""
    many = f"python3 -I -S -c 'for i in range({MAX_FILES + 1}): open(str(i), \"w\").close()'"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:  # on a disk it takes a minute
        sandboxes = ProcessSandboxes(Path(memory))
        sandbox = await sandboxes.start()
        given_task = task(RUNS_TESTS, files=TESTS, user=user)
        hidden = judged(sandboxes, sandbox, given_task, f"echo '{LIAR}' > unittest.py; {many}")
        if user == "root":
            with pytest.raises(AttemptFailed, match=f"more than {MAX_FILES} files"):
                await hidden
        else:
            reward, findings = await hidden
            assert reward == 0 and findings.removed == [f"{sandbox.work}/unittest.py"]
        await sandbox.stop()


async def test_what_the_task_lets_the_agent_have_stays(sandboxes: ProcessSandboxes, sandbox: ProcessSandbox) -> None:
    plant = f"echo '{LIAR}' > unittest.py"
    reward, findings = await judged(sandboxes, sandbox, task(RUNS_TESTS, files=TESTS, keep=["unittest.py"]), plant)
    assert reward == 1.0 and findings.removed == []


async def test_a_changed_test_configuration_is_put_back(sandboxes: ProcessSandboxes, sandbox: ProcessSandbox) -> None:
    before = "mkdir tests; echo honest > conftest.py; echo honest > pytest.ini; echo mine > tests/conftest.py"
    agent = "echo lies > conftest.py; rm pytest.ini; ln -s /etc/passwd pytest.ini; rm tests/conftest.py"
    command = 'test "$(cat conftest.py pytest.ini tests/conftest.py)" = "$(printf "honest\\nhonest\\nmine")"'
    files = {"tests/test_it.py": ""}
    reward, findings = await judged(sandboxes, sandbox, task(command, files=files), agent, before)
    assert reward == 1.0 and len(findings.restored) == 3 and findings.left == []


HOOK = "printf '#!/bin/sh\\ntouch hooked' > .git/hooks/pre-commit && chmod +x .git/hooks/pre-commit"
COMMIT = "git -c user.name=a -c user.email=b commit -q --allow-empty -m x"


@pytest.mark.parametrize(
    "agent, command",
    [
        ("echo 'exit 0' > ~/.profile", 'bash -lc "exit 1"'),
        ("git config --global core.pager false", "git config core.pager | grep -q false"),
        (f"git init -q . && {HOOK}", f"{COMMIT} && test -e hooked"),
    ],
)
async def test_start_files_and_hooks_of_the_agent_are_out_of_the_way(
    sandboxes: ProcessSandboxes, sandbox: ProcessSandbox, agent: str, command: str
) -> None:
    reward, _ = await judged(sandboxes, sandbox, task(command), agent)
    assert reward == 0.0


async def test_compiled_python_of_the_agent_is_not_read(sandboxes: ProcessSandboxes, sandbox: ProcessSandbox) -> None:
    """A .pyc may say that nobody is to compare it with its source."""
    compiles = (
        "import py_compile; py_compile.compile('checker.py', invalidation_mode="
        "py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    agent = f'echo "OK = True" > checker.py; python3 -c "{compiles}"; rm checker.py'
    command = 'python3 -c "import sys, checker; sys.exit(not checker.OK)"'
    reward, _ = await judged(sandboxes, sandbox, task(command, files={"checker.py": "OK = False\n"}), agent)
    assert reward == 0.0


async def test_the_reward_file_cannot_be_known_or_waited_for(
    sandboxes: ProcessSandboxes, sandbox: ProcessSandbox
) -> None:
    """A loop of the agent would write every file called reward that appears in its home."""
    loop = "while :; do for f in ~/*/reward* ~/reward*; do echo 1 > $f; done; done"
    reward, _ = await judged(
        sandboxes, sandbox, task("echo 0 > $REWARD_FILE; sleep 0.5"), f"(setsid sh -c '{loop}' >/dev/null 2>&1 &)"
    )
    assert reward == 0.0


async def test_a_fresh_sandbox_holds_the_working_directory_and_nothing_else(
    sandboxes: ProcessSandboxes, sandbox: ProcessSandbox
) -> None:
    agent = "echo hello > hello.txt; ln -s hello.txt link; chmod 700 hello.txt; echo home > ~/planted"
    command = f"test -x link && grep -q hello link && [ ! -e ~/planted ] && [ $PWD != {sandbox.work} ]"
    reward, _ = await judged(sandboxes, sandbox, task(command, where="fresh"), agent)
    assert reward == 1.0 and list(sandboxes.root.iterdir()) == []  # the agent's is not needed any more


async def test_a_verdict_that_fails_while_the_daemon_is_away_leaves_no_second_error_to_asyncio(
    sandboxes: ProcessSandboxes, sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem["message"]))
    judge = task("true", where="fresh")
    snapshot = await take_snapshot(sandbox, judge, sandboxes)

    async def stop() -> None:
        raise SandboxError("the daemon is away")

    with monkeypatch.context() as away:
        away.setattr(sandbox, "stop", stop)
        with pytest.raises(AttemptFailed, match="no verdict"):
            async with verifier_sandbox(sandboxes, sandbox, judge, snapshot):
                raise AttemptFailed("verifier", "no verdict")
    gc.collect()
    assert problems == []


async def test_findings_are_kept(sandboxes: ProcessSandboxes, sandbox: ProcessSandbox, tmp_path: Path) -> None:
    _, findings = await judged(sandboxes, sandbox, task("true"), "echo x > conftest.py; echo y > made.txt")
    write_findings(tmp_path, "attempt-1", findings)
    changes = msgspec.json.decode(gzip.decompress((tmp_path / "attempt-1.changes.json.gz").read_bytes()))
    assert changes["added"] == [f"{sandbox.work}/conftest.py", f"{sandbox.work}/made.txt"]
    kept = msgspec.json.decode((tmp_path / "attempt-1.steering.json").read_bytes())
    assert kept == {"removed": [f"{sandbox.work}/conftest.py"], "restored": [], "left": []}


def test_directories_that_an_agent_can_write_to_leave_the_path() -> None:
    assert safe_path("/home/a/bin:/usr/bin:.:/work/bin::/work:/bin", ("/work", "/home/a")) == "/usr/bin:/bin"


async def test_the_ground_survives_many_files(sandboxes: ProcessSandboxes, sandbox: ProcessSandbox) -> None:
    await sandbox.run("for i in $(seq 300); do mkdir d$i; echo $i > d$i/conftest.py; done", Limits(), {})
    files = {f"d{i}/test.py": "" for i in range(1, 301)}
    snapshot: Snapshot = await take_snapshot(sandbox, task("true", files=files), sandboxes)
    assert len(snapshot.originals) == 300 and snapshot.originals[f"{sandbox.work}/d7/conftest.py"] == b"7\n"
