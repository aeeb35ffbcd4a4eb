"""The unmodified agents, driven through the real proxy by a script: tool call, file, passing verifier."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.agents import INSTALLED
from harness.agents.base import Endpoint
from harness.cli import main
from harness.services import Service
from tests.conftest import need
from tests.harness.conftest import HELLO, results, write_tasks

IN_CI = ("mini-swe-agent", "opencode")
AGENTS = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in sorted(INSTALLED)]


def need_agent(name: str) -> None:
    package = INSTALLED[name].package
    need(f"{name} {package.version} (harness agents install {name})", package.installed_version() == package.version)


@pytest.mark.parametrize("name", AGENTS)
def test_an_unmodified_agent_does_what_the_script_says(name: str, proxy: Service, tmp_path: Path) -> None:
    need_agent(name)
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"timeout": 240})
    where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", proxy.url]
    assert main(["run", str(tasks), "--agent", name, *where]) == 0
    (row,) = results(tmp_path / "run")
    assert (row["reward"], row["failure"]) == (1.0, None), row
    assert row["completions"] >= 2 and row["trainable"] == row["completions"]


def test_the_shell_agent_tells_the_model_no_more_than_the_task(run: Callable[..., list[dict[str, Any]]]) -> None:
    (row,) = run()
    assert (row["reward"], row["completions"], row["attempts"]) == (1.0, 2, 1)


@pytest.mark.parametrize("name", AGENTS)
def test_an_instruction_that_looks_like_an_option_stays_an_argument(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_agent(name)
    launch = INSTALLED[name].launch(Endpoint("http://127.0.0.1:1/v1", "bf-key", "model", 4096))
    assert '"$INSTRUCTION"' in launch.command and "bf-key" not in str(launch)
