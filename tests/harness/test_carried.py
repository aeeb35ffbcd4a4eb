"""What an agent leaves travels into a fresh sandbox as data: in process sandboxes, as nothing here needs isolation."""

import asyncio
import io
import os
import sys
import tarfile
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from harness.environment import archive as archives
from harness.environment import file_manifest
from harness.environment.archive import Entry, TooMuch, unpack
from harness.environment.augment import every
from harness.environment.file_manifest import FileDifference
from harness.environment.snapshot import set_up, spec_of, take_snapshot
from harness.environment.varied import vary
from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.tasks.verdict_options import Augment
from harness.verdict.carried import carry
from harness.verdict.carried.compare import Comparison, compare
from harness.verdict.carried.git import harmless
from harness.verdict.carried.steering import configures_pytest
from harness.verdict.findings import IsolationFindings
from harness.verdict.fresh import gives_verdict_untouched
from harness.verdict.isolation import verifier_sandbox
from harness.verdict.shared import shared_warning
from sandboxes.base import Limits, SandboxError
from sandboxes.fleet import HostOptions, Hosts
from sandboxes.local import files as local_files
from sandboxes.local.process import ProcessSandboxes
from tests.harness.conftest import HELLO

TESTS = {"tests/test_it.py": "import unittest\n"}


async def carried(
    sandboxes: ProcessSandboxes, agent: str, shown: str, before: str = "true", *, varied: str = "", **verifier: Any
) -> tuple[str, IsolationFindings]:
    """What a command says of the verifier's room after this agent, and what was set apart on the way.

    `before`: the set-up. `varied`: the command of a variation of the environment.
    """
    described = {"command": "true", "where": "fresh", **verifier}
    task = msgspec.convert(HELLO | {"setup": before, "verifier": described}, Task)
    sandbox = await sandboxes.start(spec_of(task))
    try:
        await set_up(sandbox, task)
        variations = list(every(Augment(commands={"varied": varied}))) if varied else []
        applied = await vary(sandbox, task, sandboxes.kind, variations)
        snapshot = await take_snapshot(sandbox, task, sandboxes, applied.files)
        result = await sandbox.run(agent, Limits(), {})
        assert result.exit_code == 0, result.output
        async with verifier_sandbox(sandboxes, sandbox, task, snapshot) as (room, findings):
            return (await room.run(shown, Limits(), {})).output.strip(), findings
    finally:
        await sandbox.stop()


def tree(where: str = ".") -> str:
    return f"find {where} -mindepth 1 -not -path './.git/*' | sort | tr '\\n' ' '"


async def test_files_directories_and_the_executable_bit_travel_and_nothing_else_of_a_mode(
    sandboxes: ProcessSandboxes,
) -> None:
    agent = "mkdir -p a/empty; echo x > a/x; chmod 4711 a/x; echo y > y; chmod 000 y; mkfifo f; ln y z; chmod 0 a/empty"
    shown, findings = await carried(sandboxes, agent, "find . -mindepth 1 -printf '%P %M\\n' | sort")
    assert shown.splitlines() == [
        "a drwxr-xr-x", "a/empty drwxr-xr-x", "a/x -rwxr-xr-x", "y -rw-r--r--", "z -rw-r--r--",
    ]  # fmt: skip
    assert [Path(path).name for path in findings.left_out] == ["f"]
    assert [Path(path).name for path in findings.difference.added] == ["a", "empty", "x", "y", "z"]


async def test_only_links_that_stay_inside_travel_and_those_that_were_there_before(
    sandboxes: ProcessSandboxes,
) -> None:
    before = "mkdir d; ln -s /etc/passwd given; echo hello > d/file"
    agent = "ln -s d/file in; ln -s ../d/file d/up; ln -s $PWD/d/file absolute; ln -s /etc/passwd out; ln -s .. up"
    agent += "; ln -s /etc here; ln -s here/passwd through; mkdir e; ln -s .. e/root; ln -s e/root/../x over"
    shown, findings = await carried(sandboxes, agent, "find . -type l -printf '%P>%l\\n' | sort", before)
    expected = [
        "absolute>d/file",
        "d/up>../d/file",
        "e/root>..",
        "given>/etc/passwd",
        "in>d/file",
    ]
    assert shown.splitlines() == expected
    assert sorted(Path(path).name for path in findings.left_out) == ["here", "out", "over", "through", "up"]


async def test_links_that_cannot_be_followed_are_left_out_and_the_rest_travels(sandboxes: ProcessSandboxes) -> None:
    agent = "ln -s $(printf '%0300d' 0) long; ln -s b a; ln -s a b; echo hi > file; i=0; "
    agent += "while [ $i -lt 1500 ]; do ln -s l$((i+1)) l$i; i=$((i+1)); done; ln -s file l1500"
    shown, findings = await carried(sandboxes, agent, "cat file; ls long a b l0 l1400 2>&- || ls l1500")
    assert shown.split() == ["hi", "l1500"]
    left_out = {Path(path).name for path in findings.left_out}
    assert {"long", "a", "b", "l0", "l1400"} <= left_out and "l1499" not in left_out


@pytest.mark.parametrize("carry", ["files", "changes"])
async def test_what_a_variation_did_to_the_working_directory_does_not_travel(
    sandboxes: ProcessSandboxes, carry: str
) -> None:
    before = "mkdir docs; echo a > docs/guide; echo one > kept; echo one > changed; echo one > worked; touch turned"
    varied = "rm -r docs turned; mkdir -p new/deep turned; touch new/deep/file turned/x conftest.py; ln -s new link"
    varied += "; mkdir shared; touch shared/varied; ln -s /etc/passwd out; echo two > changed; echo two > worked"
    agent = "echo mine > shared/own; echo three >> worked; rm kept; echo four > guide"
    shown, findings = await carried(
        sandboxes, agent, f"{tree()}; cat docs/guide changed worked", before, varied=varied, carry=carry
    )
    listed = "./changed ./docs ./docs/guide ./guide ./shared ./shared/own ./turned ./worked a one two three"
    assert shown.split() == listed.split()
    names = {kind: [Path(path).name for path in paths] for kind, paths in vars(findings.difference).items()}
    assert names == {"added": ["guide", "shared", "own"], "changed": ["worked"], "removed": ["kept"]}
    assert not (findings.removed or findings.restored or findings.left_out)


@pytest.mark.parametrize("size", [file_manifest.COMMAND_BYTES, 1], ids=["one command", "a command for each"])
async def test_the_fresh_sandbox_has_what_the_agent_removed_no_more(
    sandboxes: ProcessSandboxes, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(file_manifest, "COMMAND_BYTES", size)
    before = "mkdir -p d/e; touch d/e/f gone turned; ln -s gone link; echo same > same"
    agent = "rm -r d gone link; rm turned; mkdir turned; touch turned/x; echo new > ~/.carried"
    shown, findings = await carried(sandboxes, agent, tree(), before)
    assert shown == "./same ./turned ./turned/x"
    assert [Path(path).name for path in findings.difference.removed] == ["d", "e", "f", "gone", "link"]


async def test_nothing_travels_where_the_modules_of_the_image_cannot_be_listed(
    sandboxes: ProcessSandboxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list that failed once counted as an image without modules, so what shadows them travelled."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "bin/python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match="modules of the fresh sandbox cannot be listed"):
        await carried(sandboxes, "touch helper.py", "ls")


async def test_what_steers_a_verifier_stays_as_it_was(sandboxes: ProcessSandboxes) -> None:
    before = "mkdir tests; echo mine > tests/conftest.py; touch queue.py; printf '[tool.x]\\n' > pyproject.toml"
    agent = """
    echo lies > tests/conftest.py; touch json.py random.pyc unittest.py tests/__init__.py pytest.ini sitecustomize.py
    mkdir -p evil.dist-info argparse html email src; touch argparse/__init__.py
    touch evil.dist-info/entry_points.txt email/data src/json.py calc.py
    printf '[tool.pytest.ini_options]\\naddopts = "-p evil"\\n' > pyproject.toml; printf '[metadata]\\n' > setup.cfg
    printf '[tool:pytest]\\n' > tox.ini; echo work > queue.py
    """
    show = f"{tree()}; cat tests/conftest.py pyproject.toml queue.py"
    shown, findings = await carried(sandboxes, agent, show, before, files=TESTS)
    listed = "./calc.py ./email ./email/data ./html ./pyproject.toml ./queue.py ./setup.cfg"
    listed += " ./src ./src/json.py ./tests ./tests/conftest.py mine [tool.x] work"
    assert shown.split() == listed.split()
    gone = (
        "argparse evil.dist-info json.py pytest.ini random.pyc sitecustomize.py tests/__init__.py tox.ini unittest.py"
    )
    assert sorted(path.partition("/work/")[2] for path in findings.removed) == gone.split()
    assert sorted(path.partition("/work/")[2] for path in findings.restored) == ["pyproject.toml", "tests/conftest.py"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pyproject.toml", '[tool]\npytest.ini_options.addopts = "--collect-only"'),
        ("pyproject.toml", "[tool . pytest.ini_options]"),
        ("pyproject.toml", '["tool"."py\\u0074est".ini_options]'),
        ("pyproject.toml", f"#{'#' * (1 << 20)}\n[tool.pytest.ini_options]"),
        ("pyproject.toml", f"[tool]\n{'a.' * 100_000}a = 1"),
        ("pyproject.toml", f"a = {'[' * 10_000}"),
        ("tox.ini", "#\r[pytest]\raddopts = --collect-only\r"),
        ("setup.cfg", "#\x0b[tool:pytest]\x0baddopts = --collect-only"),
        ("setup.cfg", "\ufeff[tool:pytest] # x"),
    ],
)
def test_a_section_for_pytest_is_found_however_it_is_written(name: str, content: str) -> None:
    assert configures_pytest(name, content.encode())


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pyproject.toml", '[project]\ndependencies = ["pytest>=8"]\n[tool.ruff]\nline-length = 120'),
        ("tox.ini", "[testenv:pytest]\ncommands = pytest"),
        ("setup.cfg", "[options]\ninstall_requires = pytest[toml]"),
    ],
)
def test_a_project_file_that_only_mentions_pytest_travels(name: str, content: str) -> None:
    assert not configures_pytest(name, content.encode())


async def test_no_project_file_travels_that_is_too_long_to_be_looked_at(sandboxes: ProcessSandboxes) -> None:
    agent = "(head -c 1048576 /dev/zero | tr '\\0' '#'; printf '\\n[tool.pytest.ini_options]\\n') > pyproject.toml"
    shown, findings = await carried(sandboxes, agent, tree(), files=TESTS)
    assert shown == "" and [Path(path).name for path in findings.removed] == ["pyproject.toml"]


async def test_neither_a_link_nor_an_old_directory_becomes_a_package_that_shadows_a_module(
    sandboxes: ProcessSandboxes,
) -> None:
    agent = "mkdir evil; touch evil/__init__.py html/__init__.py; ln -s evil random; ln -s evil mine"
    shown, findings = await carried(sandboxes, agent, tree(), "mkdir html; touch html/page")
    assert shown == "./evil ./evil/__init__.py ./html ./html/page ./mine"
    assert sorted(path.partition("/work/")[2] for path in findings.removed) == ["html/__init__.py", "random"]


def test_what_steers_a_verifier_stays_where_the_artifact_lies_above_the_working_directory(tmp_path: Path) -> None:
    described = {"command": "true", "files": TESTS, "artifacts": [{"path": "/app"}]}
    task = msgspec.convert(HELLO | {"profile": "harbor", "work": "/app/src", "verifier": described}, Task)
    sandbox = SimpleNamespace(work="/app/src", home="/root")
    archives = []
    for name, files in (("before", []), ("now", ["src/conftest.py", "src/json.py", "src/calc.py", "beside"])):
        (tmp_path / name / "src").mkdir(parents=True)
        for file in files:
            (tmp_path / name / file).write_text("x")
        archives.append(io.BytesIO())
        with tarfile.open(fileobj=archives[-1], mode="w") as archive:
            archive.add(tmp_path / name, "app")
    [place] = carry.places_of(task, sandbox)  # type: ignore[arg-type]
    given = Comparison(task=task, place=place, modules=list, staging=tmp_path / "staging", limit=1 << 30)
    findings = IsolationFindings(FileDifference(), [], [], [])
    compare(given, archives[1], archives[0], findings)
    assert sorted(findings.removed) == ["/app/src/conftest.py", "/app/src/json.py"]
    assert (
        sorted(file.name for file in given.staging.rglob("*.*")) == ["calc.py"] and (given.staging / "beside").exists()
    )


async def test_a_module_that_the_image_has_installed_is_not_replaced(
    sandboxes: ProcessSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # a Python that has msgspec
    shown, findings = await carried(sandboxes, "mkdir msgspec; touch msgspec/__init__.py msgspec.py mine.py", tree())
    assert shown == "./mine.py" and len(findings.removed) == 2


async def test_what_the_task_lets_the_agent_have_travels(sandboxes: ProcessSandboxes) -> None:
    shown, findings = await carried(sandboxes, "touch json.py conftest.py", tree(), keep=["json.py", "conftest.py"])
    assert shown == "./conftest.py ./json.py" and findings.removed == []


HOSTILE = """
git init -q . && git config user.name me && git config filter.x.clean 'touch ~/ran; cat'
git config core.fsmonitor 'touch ~/ran' && echo '* filter=x' | tee .gitattributes > .git/info/attributes
mkdir -p .git/hooks && printf '#!/bin/sh\\ntouch ~/ran\\n' > .git/hooks/post-index-change && chmod +x .git/hooks/*
git -c filter.x.clean=cat -c core.fsmonitor= add -A && echo more > file
"""


IN_HALVES = """
git init -q . && git add -A && git -c user.name=a -c user.email=b@c commit -qm a
printf '#!/bin/sh\\ntouch ~/ran\\n' > lie; chmod +x lie; mkdir -p g/worktrees/x common
mv .git/objects .git/refs common; mv .git/HEAD .git/index g/worktrees/x; mv .git/config common; rm -r .git
echo ../../../common > g/worktrees/x/commondir; echo 'gitdir: g/worktrees/x' > .git
git config -f common/config diff.external "./lie"; git config -f common/config filter.x.clean ./lie
echo '* filter=x' > .gitattributes; echo more > file
"""


async def test_git_obeys_nothing_of_a_repository_in_two_halves(sandboxes: ProcessSandboxes) -> None:
    """git asks for no HEAD in the half that a `commondir` names, and that half has the configuration."""
    show = "git status --short; git diff >/dev/null; cat common/config; test -e ~/ran && echo ran"
    shown, findings = await carried(sandboxes, IN_HALVES, show, "echo x > file")
    assert "M file" in shown and "./lie" not in shown and not shown.endswith("ran"), shown
    assert [path.partition("/work/")[2] for path in findings.restored] == ["common/config"]


async def test_git_obeys_nothing_of_the_agents(sandboxes: ProcessSandboxes) -> None:
    show = "git status --short; git config user.name; git config filter.x.clean; ls .git/hooks 2>/dev/null; "
    show += "ls .git/info | grep -v exclude; test -e ~/ran && echo ran"
    shown, _ = await carried(sandboxes, HOSTILE, show, "echo x > file")
    assert shown.split() == ["A", ".gitattributes", "AM", "file", "me"]


def test_a_git_configuration_keeps_what_runs_nothing() -> None:
    config = "[core]\n\tbare = false\n\tfsmonitor = evil\n\tsshCommand = e\\\n\tbare = evil\n[include] path = /x\n"
    config += (
        '[remote "a b"]\n\turl = https://x/y\n\tuploadpack = evil\n[core] hooksPath = evil\n[alias]\n\tst = !evil\n'
    )
    assert (
        harmless(config) == '[core]\n\tbare = false\n[include]\n[remote "a b"]\n\turl = https://x/y\n[core]\n[alias]\n'
    )


async def test_declared_artifacts_travel_and_the_rest_stays(sandboxes: ProcessSandboxes) -> None:
    agent = "mkdir -p out/cache deep/er; echo 1 > out/a; echo 2 > out/cache/b; echo 3 > deep/er/c; chmod +x deep/er/c"
    agent += "; echo 4 > other; echo 5 > ~/note; rm stale out/old; mkdir gone; ln -s /etc out2"
    artifacts = [{"path": "out", "exclude": ["cache"]}, {"path": "deep/er/c"}, {"path": "~/note"}, {"path": "stale"}]
    shown, _ = await carried(
        sandboxes,
        agent,
        f"{tree()}; test -x deep/er/c && cat ../home/note",
        "touch stale; mkdir out; touch out/old",
        artifacts=[*artifacts, {"path": "out2/passwd"}],
    )
    assert shown.split() == ["./deep", "./deep/er", "./deep/er/c", "./out", "./out/a", "5"]


async def test_changes_alone_travel_where_the_task_says_so(sandboxes: ProcessSandboxes) -> None:
    before = "head -c 8 /dev/urandom | od -An -tx1 > random; cp random gone; cp random ~/random; echo a > kept"
    agent = "echo c > kept; echo d > new; rm gone; mkdir made; touch -d @1 random"
    for way, kept in (("changes", "same"), ("files", "other")):
        show = "cmp -s random ../home/random && echo same || echo other; cat kept new; ls"
        shown, findings = await carried(sandboxes, agent, show, before, carry=way)
        assert shown.split() == [kept, "c", "d", "kept", "made", "new", "random"]
        assert [Path(path).name for path in findings.difference.removed] == ["gone"]


async def test_more_than_may_be_carried_is_no_verdict(
    sandboxes: ProcessSandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_ENTRIES", 20)
    with pytest.raises(AttemptFailed, match="holds more than 20 files") as failed:
        await carried(sandboxes, "for i in $(seq 30); do touch $i; done", "true")
    assert failed.value.kind == "verifier" and list(sandboxes.root.iterdir()) == []


@pytest.mark.parametrize("module", [archives, local_files], ids=["reading", "packing"])
async def test_a_set_up_that_leaves_more_than_may_be_read_is_at_fault_itself(
    sandboxes: ProcessSandboxes, monkeypatch: pytest.MonkeyPatch, module: ModuleType
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRIES", 20)
    with pytest.raises(AttemptFailed, match="more than 20 files.*the set-up leaves too much") as failed:
        await carried(sandboxes, "true", "true", "for i in $(seq 30); do touch $i; done", carry="changes")
    assert failed.value.kind == "image"


@pytest.mark.parametrize("whole", [True, False])
async def test_a_host_with_one_place_is_enough_also_where_the_work_cannot_be_packed(
    sandboxes: ProcessSandboxes, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The fresh sandbox waits for the agent's place, which is free once its work is packed or is too much to be."""

    async def opening(address: str) -> ProcessSandboxes:
        return sandboxes

    monkeypatch.setattr(carry, "HEADERS", 1 << 20)
    hosts = Hosts([HostOptions(address="here", limit=1)], opening, kind="process")
    task = msgspec.convert(HELLO | {"limits": {"disk_mb": 2}, "verifier": {"command": "true", "where": "fresh"}}, Task)
    sandbox = await hosts.start(spec_of(task))
    snapshot = await take_snapshot(sandbox, task, hosts)
    await sandbox.run(f"head -c {1 if whole else 4 << 20} /dev/zero > work", Limits(), {})
    with nullcontext() if whole else pytest.raises(SandboxError, match="cannot be packed"):
        async with asyncio.timeout(120), verifier_sandbox(hosts, sandbox, task, snapshot) as (room, _):
            assert (await room.run("wc -c < work", Limits(), {})).output.split() == ["1"]
    assert list(sandboxes.root.iterdir()) == []


async def test_a_deep_tree_is_cut_off_and_judged(sandboxes: ProcessSandboxes) -> None:
    deep = 'echo work > work; python3 -c \'import os\nfor _ in range(300): os.mkdir("d"), os.chdir("d")\''
    shown, findings = await carried(sandboxes, deep, "cat work; find . -type d | wc -l")
    assert shown.split() == ["work", "101"] and findings.left_out != []


def forged(*members: tuple[str, bytes, str]) -> io.BytesIO:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, kind, leads_to in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, leads_to, 0o7777
            tar.addfile(member, io.BytesIO(b""))
    archive.seek(0)
    return archive


def test_a_forged_archive_writes_nothing_outside_of_its_directory(tmp_path: Path) -> None:
    hostile = forged(
        ("data", tarfile.DIRTYPE, ""), ("data/../../a", tarfile.REGTYPE, ""), ("data//etc/b", tarfile.REGTYPE, ""),
        ("data/link", tarfile.SYMTYPE, ".."), ("data/link/c", tarfile.REGTYPE, ""), ("data/d", tarfile.CHRTYPE, ""),
        ("data/hard", tarfile.LNKTYPE, "/etc/passwd"), ("data/line\nbreak", tarfile.REGTYPE, ""),
        ("data/\udcff", tarfile.REGTYPE, ""), ("data/" + "x/" * 120, tarfile.DIRTYPE, ""),
    )  # fmt: skip
    target = tmp_path / "in" / "to"
    target.parent.mkdir()
    result = unpack(hostile, target, "/work", {}, 1000)
    assert list(tmp_path.rglob("*")) == [target.parent, target, target / "link", target / "link" / "c"]
    assert set(result.entries) == {"", "link/c"} and len(result.left_out) == 8
    assert os.stat(target / "link" / "c").st_mode & 0o7777 == 0o755


def test_the_bytes_of_an_archive_are_counted_with_every_name_of_a_file(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        first = tarfile.TarInfo("data/a")
        first.size = 600
        tar.addfile(first, io.BytesIO(b"x" * 600))
        second = tarfile.TarInfo("data/b")
        second.type, second.linkname = tarfile.LNKTYPE, "data/a"
        tar.addfile(second)
    archive.seek(0)
    assert unpack(archive, tmp_path / "a", "/work", {}, 1200).entries["b"].kind == "file"
    archive.seek(0)
    with pytest.raises(TooMuch, match="the files of /work hold more"):
        unpack(archive, tmp_path / "b", "/work", {}, 1199)
    archive.seek(0)
    assert unpack(archive, None, "/work", {}, 1200).entries["b"] == Entry("file", unpack_digest(archive))


def unpack_digest(archive: io.BytesIO) -> str:
    archive.seek(0)
    return unpack(archive, None, "/work", {}, 1200).entries["a"].content


def test_a_run_warns_of_the_tasks_that_are_judged_where_the_agent_worked() -> None:
    def task(name: str, **more: Any) -> Task:
        return msgspec.convert(HELLO | {"id": name, **more}, Task)

    fresh, kept = task("fresh"), [task(f"kept-{number}", daemons=True) for number in range(7)]
    assert shared_warning([fresh], "docker") == shared_warning([fresh], "bubblewrap") == ""
    assert shared_warning([fresh], "process").startswith("1 of 1 task is verified in the agent's own sandbox (fresh)")
    warning = shared_warning([fresh, *kept], "docker")
    assert (
        warning.startswith("7 of 8 tasks are verified")
        and "kept-4, 2 more)" in warning
        and "cheating by neighbours" in warning
    )


async def test_a_verdict_takes_the_place_of_its_agent_before_an_agent_that_waited_longer(
    sandboxes: ProcessSandboxes,
) -> None:
    """With one place and one verifier at a time, that agent would wait for the verifier, and the verdict for it."""

    async def opening(address: str) -> ProcessSandboxes:
        return sandboxes

    hosts = Hosts([HostOptions(address="here", limit=1)], opening, kind="process")
    task = msgspec.convert(HELLO | {"verifier": {"command": "true", "where": "fresh"}}, Task)
    sandbox = await hosts.start(spec_of(task))
    snapshot = await take_snapshot(sandbox, task, hosts)
    other = asyncio.create_task(hosts.start(spec_of(task)))
    await asyncio.sleep(0)  # it waits for a place from here on
    async with asyncio.timeout(60), verifier_sandbox(hosts, sandbox, task, snapshot) as (room, _):
        assert not other.done() and (await room.run("true", Limits(), {})).exit_code == 0
        assert await gives_verdict_untouched(hosts, task, snapshot, ())
        assert not other.done()
    await (await other).stop()
