"""A run's file and its flags: what overrides what, and what is refused, one sentence each."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.settings import AgentEntry, load_settings
from harness.setup.stack import RunningProxy
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.run_status import run_status
from proxy.pool.rollouts.runs import find_run
from tests.harness.conftest import HELLO, ROOT, SHELL_AGENT, results, write_tasks
from tests.harness.test_run import start, wait_for

CommandLine = Callable[..., list[str]]
TWO = f"""
tasks = "tasks.jsonl"
group_size = 2
epochs = 3
[[agents]]
agent = "command"
name = "shell"
command = "{SHELL_AGENT}"
[[agents]]
agent = "command"
name = "again"
command = "{SHELL_AGENT}; true"
held_out = true
"""


def file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_flags_override_the_file_whose_paths_are_its_own(tmp_path: Path) -> None:
    given = file(tmp_path / "run.toml", 'tasks = "t.jsonl"\nagent = "codex"\nseed = 3\npool = "postgresql://h/n"\n')
    settings = load_settings([given], {"seed": 4, "turns": None, "scripted": "here.py:x"})
    assert (settings.tasks, settings.agent, settings.seed) == (str(tmp_path / "t.jsonl"), "codex", 4)
    assert (settings.pool, settings.scripted, settings.turns) == ("postgresql://h/n", "here.py:x", None)


def test_the_file_on_the_page_is_one(tmp_path: Path) -> None:
    [text] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/runs.md").read_text(), re.DOTALL)
    settings = load_settings([file(tmp_path / "run.toml", text)], {})
    assert [entry.held_out for entry in settings.agents] == [False, True] and settings.turns == 40
    assert settings.tokens == ((0, 4096), (50, 8192))
    assert settings.agents[1].weight == 0 and settings.eval_tasks and settings.until_step


def test_tasks_alone_are_enough(tmp_path: Path) -> None:
    assert load_settings(["a.jsonl", "b"], {"agent": "codex"}).sources == ("a.jsonl", "b")
    mix = file(tmp_path / "mix.toml", '[[source]]\npath = "a.jsonl"\n')
    assert load_settings([mix], {}).sources == (mix,)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("grup_size = 2", "unknown key `grup_size`"),
        ("group_size = 0", "group_size = 0: expected `int` >= 1"),
        ("seconds = -1.0", "seconds = -1.0: expected `float` > 0"),
        ("[[agents]]\nagent = 'codex'\nwight = 2", "agents[0]: unknown key `wight`"),
        ("agents = [", "is not valid TOML"),
        ("tokens = [[0, -1]]", "tokens[0][1] = -1: expected `int` >= 1"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        load_settings([file(tmp_path / "run.toml", f"tasks = 't'\n{text}")], {})
    assert sentence in str(refused.value) and "run.toml" in str(refused.value)


@pytest.mark.parametrize("steps", [[5], [0, 7, 7], []])
def test_steps_of_a_token_limit_that_make_no_sense(tmp_path: Path, steps: list[int]) -> None:
    text = f"tasks = 't'\ntokens = {[[step, 100] for step in steps]}"
    with pytest.raises(UserError) as refused:
        load_settings([file(tmp_path / "run.toml", text)], {})
    assert f"are {steps}; begin with step 0 and let each be later than the last" in str(refused.value)


@pytest.mark.parametrize(
    ("agents", "purpose", "sentence"),
    [
        ([{"weight": -1.0}], "eval", "the weight of agent 'command' is -1.0"),
        ([{"weight": float("nan")}], "eval", "the weight of agent 'command' is nan"),
        ([{"weight": 0.0}], "eval", "the weights of all agents are 0"),
        ([{}, {}], "eval", "two agents of the run have the name 'command'"),
        ([{"held_out": True}], "train", "every agent of the run is held out"),
        ([{"held_out": True}, {"name": "b", "weight": 0.0}], "train", "every agent of the run is held out"),
        ([{"agent": "gpt-cli", "command": None}], "train", "the agent 'gpt-cli' is unknown"),
    ],
)
def test_agents_that_cannot_share_a_run(agents: list[dict[str, Any]], purpose: str, sentence: str) -> None:
    entries = [{"agent": "command", "command": "true"} | entry for entry in agents]
    settings = load_settings(["t"], {"agents": entries})
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        settings.scaffolds(purpose)


def test_an_agent_is_named_once() -> None:
    both = load_settings(["t"], {"agents": [AgentEntry(agent="codex")], "agent": "codex"})
    with pytest.raises(UserError, match="both `agent` and `agents`"):
        both.scaffolds("train")
    with pytest.raises(UserError, match="the run has no agent; give --agent NAME"):
        load_settings(["t"], {}).scaffolds("train")


def test_a_run_of_a_file_is_resumed_by_its_directory(
    command_line: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tasks(tmp_path / "tasks.jsonl", HELLO)
    what = command_line()[-8:]
    monkeypatch.chdir(tmp_path)
    what[what.index("--run-dir") + 1] = "run"
    assert main(["run", file(tmp_path / "run.toml", TWO), "--seed", "4", *what]) == 0
    rows = results(tmp_path / "run")
    assert len(rows) == 6 and {row["agent"] for row in rows} == {"shell", "again"}
    output = capsys.readouterr().out
    assert [words in output for words in ("all tasks   again", "all tasks   shell", "6/6 rollouts")] == [True] * 3
    monkeypatch.chdir("/")
    assert main(["resume", str(tmp_path / "run")]) == 0
    assert "resuming the run in" in capsys.readouterr().out and results(tmp_path / "run") == rows
    assert main(["run", str(tmp_path / "run.toml"), "--seed", "4", "-n", "1", *what]) == 2


def test_what_was_never_begun_cannot_be_resumed_or_watched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("resume", "watch", "behaviour"):
        assert main([verb, str(tmp_path)]) == 2
        assert f"no run was started in {tmp_path}" in capsys.readouterr().err


def test_another_terminal_sees_the_run(
    command_line: CommandLine, run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run("-n", "2")
    calls, tokens = (sum(row[key] for row in rows) / 2 for key in ("completions", "sampled_tokens"))
    capsys.readouterr()
    assert main(["watch", str(tmp_path / "run")]) == 0
    by_directory = capsys.readouterr().out
    assert f"{tmp_path.name} (train): 2/2 rollouts, 0 running, 0 queued, no process works on it" in by_directory
    assert f"command 2/2 2 1.000 {calls:.1f} {tokens:.1f}" in " ".join(by_directory.split())
    for by, key in (("step", "-"), ("agent", "command"), ("domain", "agent"), ("task", "hello"), ("tool", "shell")):
        assert main(["behaviour", str(tmp_path / "run"), "--by", by]) == 0
        shown = capsys.readouterr().out
        assert f"{key} 2 1.000" in " ".join(shown.split()) and "command share" in " ".join(shown.split())


def at_work(proxy: RunningProxy, name: str) -> int:
    pool = open_pool(proxy.pool)
    try:
        return run_status(pool, find_run(pool, name).id).open_attempts
    except UserError:  # not opened yet
        return 0
    finally:
        pool.close()


def test_a_run_at_work_is_seen_by_its_pool_too(
    command_line: CommandLine, proxy: RunningProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user = start(
        command_line(
            "-n", "3", "--concurrency", "2", tasks=[HELLO | {"timeout": 600}], command=f"{SHELL_AGENT}; sleep 600"
        )
    )
    seen = ""
    try:
        wait_for(lambda: at_work(proxy, tmp_path.name) == 2)
        assert main(["watch", "--pool", proxy.pool, "--name", tmp_path.name, "--once"]) == 0
        seen = capsys.readouterr().out
        assert main(["watch", "--once", str(tmp_path / "run")]) == 0
    finally:
        user.terminate()
        user.communicate()
    assert f"{tmp_path.name} (train): 0 rollouts, 2 running, process {user.pid} on" in seen
    assert "0/3 rollouts, 2 running, 1 queued" in capsys.readouterr().out
    assert main(["watch", "--pool", proxy.pool]) == 2
    assert "--pool and --name" in capsys.readouterr().err
