"""The agent in runs: in the sandboxes that need its bundle, with what a task brings for it, and copied out."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.agents import INSTALLED
from harness.agents.native.policy import POLICIES
from harness.agents.native_agent import CONTEXT_POLICIES, SOURCE
from harness.cli import main
from harness.setup.stack import RunningProxy
from proxy.commands.main import main as proxy_main
from proxy.pool.database import open_pool
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.finished_rollouts import finished_rollouts
from sandboxes.local.bubblewrap import why_not
from tests.conftest import need
from tests.harness.conftest import HELLO, results
from tests.harness.test_agents import need_agent
from tests.harness.test_backends import need_runtime

CommandLine = Callable[..., list[str]]


def worked(command_line: CommandLine, tmp_path: Path, *more: str, **task: Any) -> dict[str, Any]:
    """The row of a rollout of the agent."""
    arguments = command_line(*more, tasks=[HELLO | task])
    at = arguments.index("--command")
    assert main(arguments[:at] + arguments[at + 2 :]) == 0
    (row,) = results(tmp_path / "run")
    return row


def test_the_agent_works_in_bubblewrap(command_line: CommandLine, tmp_path: Path) -> None:
    need("bubblewrap (apt-get install bubblewrap)", not why_not())
    need_runtime()
    need_agent("native")
    row = worked(command_line, tmp_path, "--sandbox", "bubblewrap", "--agent", "native-hybrid")
    assert (row["reward"], row["failure"], row["completions"], row["trainable"]) == (1.0, None, 2, 2), row


def test_a_task_may_bring_settings(
    command_line: CommandLine, tmp_path: Path, proxy: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here two drafts of the first turn, whose merge is one call more."""
    need_agent("native")
    settings = {"~/.native.json": json.dumps({"drafts": 2, "tools": ["shell", "plan"]})}
    row = worked(command_line, tmp_path, "--agent", "native", files=settings)
    assert (row["reward"], row["failure"], row["completions"]) == (1.0, None, 4), row
    pool = open_pool(proxy.pool)
    (rollout,) = finished_rollouts(pool, find_run(pool, tmp_path.name).id)
    assert {item.label for item in rollout.completions} == {"main"}
    capsys.readouterr()
    assert proxy_main(["pool", "show", proxy.pool, str(rollout.completions[0].attempt_id)]) == 0
    assert "main: 3 segments" in capsys.readouterr().out


def test_settings_that_make_no_sense_fail_the_attempt_and_stand_in_its_row(
    command_line: CommandLine, tmp_path: Path
) -> None:
    need_agent("native")
    row = worked(command_line, tmp_path, "--agent", "native", files={"~/.native.json": '{"keep": 3}'})
    assert (row["reward"], row["failure"]) == (None, "agent_crash") and "unknown key, 'keep'" in row["detail"]


def test_a_copy_needs_nothing_of_the_project(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "native", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-S", "-m", "native", "--context", "100", "--", "work"],
        cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "error: the environment has no OPENAI_BASE_URL; set it\n")


def test_every_policy_is_an_agent() -> None:
    assert set(CONTEXT_POLICIES) == set(POLICIES)
    assert {"native", *(f"native-{policy}" for policy in POLICIES if policy != "free")} <= set(INSTALLED)
