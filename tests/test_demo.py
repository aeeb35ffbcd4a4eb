"""`make demo`, shortened: the whole way from teacher rollouts to the summary, with every real part."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from harness.tasks.sources import load_sources
from proxy.pool.database import open_pool
from tests.conftest import need
from tests.harness.test_agents import need_agent
from tests.proxy.dashboard.browser import EVERY_LOOK, axe, demand_clean, served, wait_for_index, walk
from tests.proxy.dashboard.make import story
from tests.proxy.dashboard.places import pages, places

ROOT = Path(__file__).parent.parent
KEYS = """eval_before eval_after eval_episodes eval_stderr reward_by_step steps policy_version rollouts completions
trainable_tokens max_abs_logprob_diff logprob_tokens_compared wall_seconds""".split()


def demo(directory: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """Run `make demo` with these options; return what it printed and its summary."""
    need("sglang and megatron-core", find_spec("sglang") is not None and find_spec("megatron") is not None)
    command = [sys.executable, "examples/demo/run.py", str(directory), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    assert set(KEYS) <= summary.keys()
    return done.stdout, summary


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_shortened_control_trains_on_shuffled_rewards(tmp_path: Path) -> None:
    _, summary = demo(tmp_path / "demo", "--control", "--steps", "1", "--episodes", "32")
    assert summary["steps"] == 1 and summary["eval_episodes"] == 32
    assert tomllib.loads((tmp_path / "demo" / "trainer.toml").read_text())["credit"]["shuffle_rewards"] is True


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_shortened_demo_reaches_its_summary_and_its_pages_are_clean(tmp_path: Path) -> None:
    """Every page in every size and scheme, without serious findings of axe; and with what the real parts recorded."""
    output, summary = demo(tmp_path / "demo", "--steps", "5", "--episodes", "128")
    assert summary["steps"] == len(summary["reward_by_step"]) == 5
    assert summary["eval_episodes"] == 128 and summary["eval_missing"] == 0 and 0 < summary["eval_before"] < 1
    assert len(set(summary["reward_by_step"])) > 1
    assert summary["logprob_tokens_compared"] >= 1000 and summary["max_abs_logprob_diff"] <= 1e-4
    assert (tmp_path / "demo" / "reward.png").stat().st_size > 1000
    assert output.splitlines()[-1].endswith(f"proxy dashboard {tmp_path / 'demo' / 'pool.db'}")
    look_at_every_page(tmp_path / "demo" / "pool.db")


def look_at_every_page(file: Path) -> None:
    pool = open_pool(str(file), create=False, read_only=True)
    found = places(pool)
    pool.close()
    with served(file) as address:
        wait_for_index(address)
        seen = walk(address, "look", 900, pages=pages(found), looks=EVERY_LOOK, axe=axe())
    assert len(seen) == 4 * len(pages(found))
    for page in seen:
        demand_clean(page)
        assert page["axe"] == [], page
    texts = {page["page"].rpartition("view=")[2]: page["text"] for page in seen}
    assert "Do what " in texts[f"/rollout/{found.rollout}?call={found.call}"]
    assert "<tool_call>" in texts["tokens"] and "trained in step" in texts["tokens"]
    assert "calls were read" in texts["events"] and "control characters are shown as signs" in texts["log"]
    assert f"Behaviour of {found.run}" in texts[f"/behaviour/{found.run}"] and "Trainer phases" in texts["/machines"]


LOOK = "import sys; from pathlib import Path; from rich.console import Console; from examples.demo.look import show\n"
LOOK += "show(Path(sys.argv[1]), Console())"
IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
AT_HOME = {name: value for name, value in os.environ.items() if name != "CI"}


def test_on_a_terminal_the_demo_ends_with_an_address_and_serves_it_until_ctrl_c(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    story(pool)
    pool.close()
    look = [sys.executable, "-c", LOOK, str(tmp_path / "pool.db")]
    terminal = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, *look],
        cwd=ROOT, env=AT_HOME, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert terminal.stdin is not None and terminal.stdout is not None
    try:
        assert "until you press Ctrl-C" in terminal.stdout.readline()
        opened = re.fullmatch(r"open (http://127\.0\.0\.1:\d+/)\?token=(\S+)\s+", terminal.stdout.readline())
        assert opened and terminal.stdout.readline().startswith("ready: ")
        with urlopen(f"{opened[1]}api/runs?token={opened[2]}", timeout=30) as response:
            assert b'"name":"train"' in response.read()
        terminal.stdin.write("\x03")  # what the Ctrl-C of a keyboard is for a terminal
        terminal.stdin.flush()
        assert terminal.wait(30) == 0
    finally:
        terminal.kill()
        terminal.wait()


def test_where_nobody_would_end_it_the_demo_ends_with_the_command(tmp_path: Path) -> None:
    look = [sys.executable, "-c", LOOK, str(tmp_path / "pool.db")]
    command = f"look at its runs in the browser: proxy dashboard {tmp_path / 'pool.db'}"
    in_ci = [sys.executable, "-c", IN_A_TERMINAL, *look]
    for argv, env in ((look, AT_HOME), (in_ci, AT_HOME | {"CI": "true"})):
        done = subprocess.run(
            argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=60
        )
        assert done.returncode == 0 and done.stdout.strip() == command


@pytest.mark.parametrize("seed", [0, 3])
def test_the_trained_tasks_that_are_evaluated_come_first_in_the_run(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "demo")
    write = import_module("examples.scaffolds.assignments").write
    write(tmp_path / "tasks", seed, {"warmup": 2, "train": 48, "heldout": 3}, known=4)
    evaluated = {task.id for task in load_sources([str(tmp_path / "tasks" / "evaluated.jsonl")]).mix.tasks}
    order = load_sources([str(tmp_path / "tasks" / "train.jsonl")]).mix.order(seed)
    assert evaluated == {"heldout-0", "heldout-1", "heldout-2", *(task.id for task in islice(order, 4))}


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_the_shortened_demo_of_several_agents_reaches_its_matrix(tmp_path: Path) -> None:
    need("sglang and megatron-core", find_spec("sglang") is not None and find_spec("megatron") is not None)
    for agent in ("smolagents", "mini-swe-agent", "aider", "native"):
        need_agent(agent)
    sizes = "--lessons 8 --steps 2 --heldout 1 --known 1 --sft-steps 4".split()
    command = [sys.executable, "examples/scaffolds/learn.py", str(tmp_path / "scaffolds"), *sizes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "scaffolds" / "summary.json").read_text())
    assert summary["command"].startswith("examples/scaffolds/learn.py") and summary["machine"]
    assert summary["steps"] == 2 and all(summary["curves"]["reward_by_agent"])
    # Empty where a step trained no token: all rewards of each of its groups were equal, as after so short a warm start.
    assert all(not share or sum(share.values()) == pytest.approx(1) for share in summary["curves"]["share_by_agent"])
    before, after = summary["matrix"]
    assert (before["step"], before["trained"]) == (0, [])
    assert after["step"] == 2 and set(after["trained"]) <= {"smolagents", "mini-swe-agent"}
    agents = {point["agent"]: point["agent_held_out"] for point in after["evaluated"]}
    assert agents.keys() == {"smolagents", "mini-swe-agent", "aider", "native"} and agents["aider"] and agents["native"]
    for row in (before, after):  # each agent at one task that was held out, and at one that was trained
        cells = sorted((point["agent"], point["tasks_held_out"], point["rollouts"]) for point in row["evaluated"])
        assert cells == [(agent, held_out, 1) for agent in sorted(agents) for held_out in (False, True)]
        # Each was sampled by the weights that it names alone, also by the initial ones.
        assert {name for point in row["evaluated"] for name in point["versions"]} == {row["version"]}
