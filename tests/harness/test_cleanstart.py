"""A clean start, and the manifest of what lies in a sandbox before and after the agent."""

import gzip
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.environment.clean_start import clean_start, leftovers
from harness.environment.file_manifest import FileManifest, take_manifest, write_difference
from harness.environment.snapshot import Snapshot, contents
from harness.tasks import Task
from harness.validation.hollow import hollow_out
from sandboxes.base import Limits, Result, SandboxError, Spec
from sandboxes.local.process import ProcessSandbox
from tests.harness.conftest import HELLO


def task(**more: Any) -> Task:
    return msgspec.convert(HELLO | more, Task)


async def shell(sandbox: ProcessSandbox, command: str) -> str:
    result = await sandbox.run(f"set -e\n{command}", Limits(), {})
    assert result.exit_code == 0, result.output
    return result.output


LEFT = """
mkdir -p ~/.cache/pip/http ~/.cache/other .pytest_cache/v __pycache__ src
touch ~/.cache/pip/http/a ~/.cache/other/b ~/.bash_history ~/.python_history $TMPDIR/build.log .pytest_cache/v/failed
touch __pycache__/test_all.cpython-311.pyc __pycache__/tool.cpython-311.pyc src/main.py src/.main.py.swp .coverage
"""
REMOVED = {
    ("caches", "~/.cache/pip"),
    ("histories", "~/.bash_history"),
    ("histories", "~/.python_history"),
    ("histories", "src/.main.py.swp"),
    ("remains", ".coverage"),
    ("remains", ".pytest_cache"),
    ("remains", "__pycache__/test_all.cpython-311.pyc"),
    ("temporary", "tmp/build.log"),
}


def short(sandbox: ProcessSandbox, path: str) -> str:
    tmp = f"{Path(sandbox.work).parent}/"
    return path.replace(f"{sandbox.home}/", "~/").removeprefix(f"{sandbox.work}/").removeprefix(tmp)


async def test_what_set_up_left_is_gone_and_the_rest_is_there(sandbox: ProcessSandbox) -> None:
    await shell(sandbox, LEFT)
    after, rows = await clean_start(sandbox, task(), await take_manifest(sandbox, Spec(), own_root=False))
    assert {(row.kind, short(sandbox, row.path)) for row in rows if row.removed} == REMOVED
    left = await shell(sandbox, 'find . ~ "$TMPDIR" -type f | sed "s|.*/||" | sort')
    assert left.split() == ["b", "main.py", "tool.cpython-311.pyc"]
    again = await take_manifest(sandbox, Spec(), own_root=False)
    assert again.files == after.files


async def test_a_task_keeps_and_reports(sandbox: ProcessSandbox) -> None:
    await shell(sandbox, LEFT)
    asked = {"caches": "report", "remains": "keep", "temporary": "remove", "keep": ["build.log", "~/.bash_history"]}
    _, rows = await clean_start(sandbox, task(clean=asked), await take_manifest(sandbox, Spec(), own_root=False))
    reported = {(row.kind, short(sandbox, row.path), row.removed) for row in rows}
    assert reported == {
        ("caches", "~/.cache/pip", False),
        ("histories", "~/.python_history", True),
        ("histories", "src/.main.py.swp", True),
    }


async def test_the_tasks_own_files_stay(sandbox: ProcessSandbox) -> None:
    mine = {"~/.bash_history": "ls\n", "src/.notes.swp": ""}
    for path, text in mine.items():
        await sandbox.write(path, text)
    _, rows = await clean_start(sandbox, task(files=mine), await take_manifest(sandbox, Spec(), own_root=False))
    assert rows == []


@pytest.mark.parametrize("path", ["/tests/test_outputs.py", "/solution/solve.sh", "/logs/verifier/reward.txt"])
def test_the_places_of_tests_are_emptied_where_the_root_is_the_sandboxes(path: str) -> None:
    files = {path: "f 644 0 1 1.0 1.0", f"/app{path}": "f 644 0 1 1.0 1.0"}
    rows = leftovers(FileManifest(files, whole=True), task(), ())
    assert [(row.kind, row.path) for row in rows] == [("tests", path.rpartition("/")[0])]


async def test_a_file_of_the_task_keeps_no_other_one_that_ends_like_it(sandbox: ProcessSandbox) -> None:
    files = dict.fromkeys(("/tests/run.sh", "/tests/test_all.py", f"{sandbox.work}/run.sh"), "f 644 0 1 1.0 1.0")
    own = {f"{sandbox.work}/run.sh"}
    rows = leftovers(FileManifest(files, whole=True), task(files={"run.sh": ""}), (), own)
    assert [(row.path, row.removed) for row in rows] == [("/tests", True)]
    await shell(sandbox, 'mkdir sub; touch a.swp sub/a.swp "[b].swp" "$TMPDIR/a.swp"')
    mine = {"a.swp": "", "./[b].swp": ""}
    _, cleaned = await clean_start(sandbox, task(files=mine), await take_manifest(sandbox, Spec(), own_root=False))
    assert {(short(sandbox, row.path), row.removed) for row in cleaned} == {("sub/a.swp", True), ("tmp/a.swp", True)}


class Slow(ProcessSandbox):
    """A sandbox whose commands of this kind reach their limit."""

    slow = "rm -rf"

    async def run(self, command: str, limits: Limits, *more: Any, **options: Any) -> Result:
        if self.slow in command:
            command, limits = "sleep 5", replace(limits, seconds=0.1)
        return await super().run(command, limits, *more, **options)


async def test_a_limit_is_no_success(sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    await shell(sandbox, f"{REPOSITORY} touch .main.py.swp")
    manifest = await take_manifest(sandbox, Spec(), own_root=False)
    monkeypatch.setattr(sandbox, "__class__", Slow)
    with pytest.raises(SandboxError, match="were not removed: ended by its timeout limit"):
        await clean_start(sandbox, task(), manifest)
    monkeypatch.setattr(Slow, "slow", "fsck")
    with pytest.raises(SandboxError, match="the history of the repository in .* was not removed"):
        await clean_start(sandbox, task(clean={"vcs": "remove"}), manifest)
    _, rows = await clean_start(sandbox, task(), manifest)
    assert [row.path for row in rows if row.kind == "vcs"] == ["not all repositories were examined within 120 s"]


REPOSITORY = """
git init -q -b main . && git config user.email a@b && git config user.name a
echo 1 > f && git add f && git commit -qm broken && git tag v1
git checkout -qb fix && echo 2 > f && git commit -qam "the solution" && git checkout -q main
"""


@pytest.mark.parametrize("action", ["report", "remove", "keep"])
async def test_a_solution_in_the_repositorys_history(sandbox: ProcessSandbox, action: str) -> None:
    await shell(sandbox, REPOSITORY)
    _, rows = await clean_start(
        sandbox, task(clean={"vcs": action}), await take_manifest(sandbox, Spec(), own_root=False)
    )
    assert [row.removed for row in rows] == ([] if action == "keep" else [action == "remove"])
    history = await shell(sandbox, "git log --all --reflog --format=%s; git tag; git fsck --unreachable --no-reflogs")
    assert ("the solution" in history) == (action != "remove") and "broken" in history and "v1" in history


async def test_what_the_agent_did_shows_as_a_difference(sandbox: ProcessSandbox, tmp_path: Path) -> None:
    await shell(sandbox, "mkdir a; echo 1 > a/same; echo 1 > a/changed; echo 1 > 'a/it''s gone'; touch -d @1 a/old")
    before = await take_manifest(sandbox, Spec(), own_root=False)
    await shell(
        sandbox, "echo 2 > a/changed; rm a/it*; echo 3 > 'new\nline'; touch a/old; touch -d @1 a/old; ln -s / l"
    )
    done = await take_manifest(sandbox, Spec(), own_root=False) - before
    work = sandbox.work
    assert (done.added, done.removed) == ([f"{work}/l", f"{work}/new\nline"], [f"{work}/a/its gone"])
    assert done.changed == [f"{work}/a/changed", f"{work}/a/old"]  # a time that was set back does not hide it
    write_difference(tmp_path / "d.gz", done)
    assert msgspec.json.decode(gzip.decompress((tmp_path / "d.gz").read_bytes()))["removed"] == done.removed


async def test_what_cannot_be_removed_is_reported(sandbox: ProcessSandbox) -> None:
    await shell(sandbox, "mkdir -p .pytest_cache/v && touch .pytest_cache/v/x")
    manifest = await take_manifest(sandbox, Spec(), own_root=False)
    with subprocess.Popen(["true"]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        link = f"/proc/{zombie.pid}/exe"
        assert os.path.islink(link) and not os.path.exists(link)
        files = manifest.files | dict.fromkeys(("/proc/self/comm", link), "f 644 0 0 1 1")  # nobody can remove these
        places = ("/proc/self", f"/proc/{zombie.pid}")
        _, rows = await clean_start(sandbox, task(), FileManifest(files, whole=True, temporary=places))
    assert {(row.path, row.removed) for row in rows} == {
        ("/proc/self/comm", False),
        (link, False),
        (f"{sandbox.work}/.pytest_cache", True),
    }


async def test_no_list_and_no_content_is_taken_from_an_output_whose_end_was_lost(
    sandbox: ProcessSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is missing in the first list would pass for the agent's own, and a missing original for none."""
    before = await take_manifest(sandbox, Spec(), own_root=False)
    await sandbox.write("main.py", "pass")
    run, lost = sandbox.run, ""

    async def lose(command: str, *arguments: Any, **more: Any) -> Result:
        return replace(await run(command, *arguments, **more), cut=lost in command)

    monkeypatch.setattr(sandbox, "run", lose)
    with pytest.raises(SandboxError, match="cannot be listed: the end of the list was lost"):
        await take_manifest(sandbox, Spec(), own_root=False)
    with pytest.raises(SandboxError, match="the end of what they hold was lost"):
        await contents(sandbox, [f"{sandbox.work}/main.py"])
    lost = "for f do"
    with pytest.raises(SandboxError, match="the solution's programs cannot be replaced"):
        await hollow_out(sandbox, task(), Snapshot(Spec(), False, before))
