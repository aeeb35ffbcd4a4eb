"""A recorded rollout is played again without an engine: an unmodified agent makes the same calls, to the same end."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.cli import main
from harness.setup.stack import RunningProxy, ask_health
from proxy.pool.completions.records import Completion
from proxy.pool.database import open_pool
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.finished_rollouts import finished_rollouts
from tests.harness.conftest import HELLO, SHELL_AGENT, results, write_tasks
from tests.harness.test_agents import need_agent
from tests.proxy.test_secrets import running

SANDBOX = "blackforge-[^/]*/[^/]*"
"""Directories of sandboxes are new for every rollout; opencode tells the model where it works."""


def ran(tmp_path: Path, name: str, url: str, agent: str) -> list[Completion]:
    """The completions of a run of one rollout, which has earned its reward."""
    words = ["--sandbox", "process", "--agent", agent]
    words += [] if agent != "command" else ["--command", SHELL_AGENT]
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"timeout": 240})
    name = f"{tmp_path.name}-{name}"
    assert main(["run", str(tasks), *words, "--run-dir", str(tmp_path / name), "--name", name, "--proxy", url]) == 0
    (row,) = results(tmp_path / name)
    assert (row["reward"], row["failure"]) == (1.0, None), row
    pool = open_pool(ask_health(url).pool or "")
    (rollout,) = finished_rollouts(pool, find_run(pool, name).id)
    pool.close()
    return rollout.completions


@pytest.mark.parametrize(
    "agent",
    [
        "command",
        pytest.param("mini-swe-agent", marks=pytest.mark.long),
        pytest.param("opencode", marks=pytest.mark.long),
    ],
)
def test_an_agent_makes_the_same_calls_again(agent: str, proxy: RunningProxy, tmp_path: Path) -> None:
    if agent != "command":
        need_agent(agent)
    recorded = ran(tmp_path, "recorded", proxy.url, agent)
    config = Path(proxy.pool.removeprefix("sqlite:///")).parent / "proxy.toml"
    log = tmp_path / "replay.log"
    words = ["--report", tmp_path / "differences.jsonl", "--ignore", SANDBOX]
    with running(log, "replay", config, recorded[0].attempt_id, *words) as (url, _):
        played = ran(tmp_path, "played", url, agent)
    assert sorted(_shown(item) for item in played) == sorted(_shown(item) for item in recorded)
    summed_up = re.search(r"attempt \d+: (\d+) of (\d+) answers played, (\d+) requests differed", log.read_text())
    assert summed_up is not None and summed_up.groups() == (str(len(recorded)), str(len(recorded)), "0")


def _shown(item: Completion) -> tuple[str, str]:
    return str(item.reply), item.finish_reason


def test_a_rollout_is_run_again_and_its_first_difference_is_told(
    command_line: Callable[..., list[str]],
    proxy: RunningProxy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    changed = tmp_path / "changed"
    agent = f"test -e {changed} && export INSTRUCTION='Write bye.txt'; {SHELL_AGENT}"
    assert main(command_line(command=agent)) == 0
    (row,) = results(tmp_path / "run")
    config = Path(proxy.pool.removeprefix("sqlite:///")).parent / "proxy.toml"
    again = ["replay", str(tmp_path / "run"), str(row["rollout"])]
    capsys.readouterr()
    assert main([*again, "--config", str(config)]) == 0
    output = capsys.readouterr().out
    assert "2 of 2 calls made, 0 requests differed" in output and "recorded 1, now 1: the same" in output
    changed.touch()
    assert main([*again, "--config", str(config)]) == 1
    output = capsys.readouterr().out
    assert "0 of 2 calls made" in output and "verdict: recorded 1, now no reward (agent_crash): different" in output
    assert re.search(r"first: request 0 differs .* in messages\[1\] \(user\), .*hello.txt.* was recorded", output), (
        output
    )
    assert main(again) == 2  # the run did not bring its proxy up
    assert "name that proxy's configuration with --config FILE" in capsys.readouterr().err
    assert main([*again[:2], "999999", "--config", str(config)]) == 2
    assert "the run has no finished rollout 999999" in capsys.readouterr().err
    assert results(tmp_path / "run") == [row]
