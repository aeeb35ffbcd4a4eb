"""Whole runs in each kind of sandbox, what is said of the choice, and what is said when there is none."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.agents.bundles.install import agents_directory
from harness.cli import main
from harness.setup.sandbox_choice import choose, runtimes_of
from harness.setup.stack import RunningProxy
from harness.tasks import Task
from proxy.pool.errors import UserError
from sandboxes.bundles import RUNTIME_NAME, read_manifest
from sandboxes.local.bubblewrap import why_not
from sandboxes.local.process import default_root
from tests.conftest import need
from tests.harness.conftest import HELLO, HERE, ROOT, results, write_tasks

AGENT = f"{os.path.realpath(sys.executable)} -I -S {ROOT / 'examples/agents/shell_agent.py'}"
SHOW = ["--show", str(ROOT / "examples/agents")]
CommandLine = Callable[..., list[str]]


def directories() -> set[str]:
    return {path.name for path in default_root().glob(f"{os.getpid()}-*")}


def test_a_run_in_bubblewrap_is_resumed_there_only(
    command_line: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    before = directories()
    arguments = command_line("-n", "2", "--sandbox", "bubblewrap", *SHOW, command=AGENT)
    assert main(arguments) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0, 1.0] and directories() == before
    assert "sandboxes: bubblewrap, isolated from" in capsys.readouterr().out
    assert msgspec.json.decode((tmp_path / "run/run.json").read_bytes())["sandbox"] == "bubblewrap"
    assert main([*arguments, "--sandbox", "process"]) == 2
    assert "was started with sandbox 'bubblewrap', now it is 'process'" in capsys.readouterr().err


@pytest.mark.long
def test_a_proxy_that_is_brought_up_listens_for_sandboxes(tmp_path: Path) -> None:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    before = directories()
    tasks, script = write_tasks(tmp_path / "tasks.jsonl", HELLO), f"{HERE / 'scripts.py'}:hello"
    how = ["--agent", "command", "--command", AGENT, "--scripted", script, "--sandbox", "bubblewrap", *SHOW]
    assert main(["run", str(tasks), "--run-dir", str(tmp_path / "run"), *how]) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] and directories() == before


@pytest.mark.long
def test_mini_swe_agent_works_in_bubblewrap(command_line: CommandLine, tmp_path: Path) -> None:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    arguments = command_line("--sandbox", "bubblewrap", "--agent", "mini-swe-agent")
    at = arguments.index("--command")
    assert main(arguments[:at] + arguments[at + 2 :]) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0]


DOCKER_TASK = HELLO | {
    "files": {"~/agent.py": (ROOT / "examples/agents/shell_agent.py").read_text()},
    "image": {"name": "deb:py"},
}
IN_DOCKER = ["--sandbox", "auto", "--command", "python3 -I -S ~/agent.py"]


def need_runtime() -> None:
    manifest = read_manifest(agents_directory() / RUNTIME_NAME)
    need("the agents' runtime (harness agents install runtime)", manifest is not None)


def test_a_run_in_docker(
    docker_daemon: str, command_line: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_runtime()
    assert main(command_line(*IN_DOCKER, tasks=[DOCKER_TASK])) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0]
    assert "sandboxes: docker, containers with limits" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_in_docker_behind_a_relay(docker_daemon: str, tmp_path: Path) -> None:
    need_runtime()
    tasks = write_tasks(tmp_path / "tasks.jsonl", DOCKER_TASK)
    how = ["--agent", "command", *IN_DOCKER, "--relay", "--scripted", f"{HERE / 'scripts.py'}:hello"]
    assert main(["run", str(tasks), "--run-dir", str(tmp_path / "run"), *how]) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0]


def test_a_proxy_without_a_listener_is_told_what_it_needs(
    command_line: CommandLine, proxy: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    socket, moved = Path(proxy.sandboxes["socket"]), Path(proxy.sandboxes["socket"] + ".away")
    socket.rename(moved)
    try:
        assert main(command_line("--sandbox", "bubblewrap")) == 2
    finally:
        moved.rename(socket)
    assert "start it with --sandbox-socket PATH" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "wish", "sentence"),
    [
        ("process", {"image": {"name": "deb:py"}}, "the task hello wants the image deb:py, which process sandboxes"),
        ("bubblewrap", {"profile": "harbor"}, "wants the profile harbor, which bubblewrap sandboxes do not have"),
        ("bubblewrap", {"daemons": True}, "wants daemons"),
        ("bubblewrap", {"services": [{"name": "db", "image": {"name": "pg"}}]}, "the task hello wants services, which"),
        ("process", {"network": "none"}, "wants no network, which process sandboxes do not have; use Docker"),
        ("process", {"directories": {"/app": "."}}, "wants /app for files of its own, which process sandboxes"),
        ("process", {"verifier": {"command": "true", "rewards": "logs"}}, "wants /logs/verifier for files of its own"),
        ("bubblewrap", {"verifier": {"command": "true", "directories": {"/tests": "."}}}, "wants /tests for files"),
    ],
)
def test_a_task_that_needs_docker_says_so(kind: str, wish: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        choose(kind, [msgspec.convert(HELLO | wish, Task)])


@pytest.mark.parametrize(
    ("wish", "runtimes", "sentence"),
    [
        (
            {},
            ["strict=nowhere"],
            "the Docker daemon at .* has no runtime 'nowhere', only .*runc; install it and name it",
        ),
        ({}, ["weak=runc"], "a runtime is strict=NAME or harbor=NAME, not: weak=runc; correct --runtime"),
        ({"network": "full"}, ["strict=runsc"], "wants a full network, which containers of runtime runsc cannot share"),
    ],
)
def test_a_runtime_that_cannot_be_had_is_one_sentence_at_the_start(
    docker_daemon: str, wish: dict[str, Any], runtimes: list[str], sentence: str
) -> None:
    need("the agents' runtime (harness agents install runtime)", bool(read_manifest(agents_directory() / RUNTIME_NAME)))
    with pytest.raises(UserError, match=sentence):
        choose("docker", [msgspec.convert(HELLO | wish, Task)], [docker_daemon], runtimes_of(runtimes))


def test_where_there_is_no_docker_the_next_best_is_taken_and_the_reason_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    plain, imaged = msgspec.convert(HELLO, Task), msgspec.convert(HELLO | {"image": {"name": "deb:py"}}, Task)
    choice = choose("auto", [plain])
    assert choice.kind == ("process" if why_not() else "bubblewrap") and "Docker daemon at unix:///nowhere" in str(
        choice
    )
    with pytest.raises(UserError, match="wants the image deb:py.*use Docker.*unix:///nowhere.sock does not answer"):
        choose("auto", [imaged])
    with pytest.raises(UserError, match="docker sandboxes do not work here .* choose another kind with --sandbox"):
        choose("docker", [plain])
