"""Runs whose groups begin with recorded successes: real agents are brought to a turn, and go on from there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from harness.cli import main
from harness.setup.stack import RunningProxy
from proxy.pool.database import Pool, open_pool
from proxy.pool.inspect.account import account
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import attempts, completions
from proxy.pool.training.finished_rollouts import finished_rollouts
from tests.harness import scripts
from tests.harness.conftest import HELLO, SHELL_AGENT, results, write_tasks
from tests.harness.test_agents import need_agent
from tests.harness.test_run import names, start, wait_for

CHECKED = HELLO | {"instruction": scripts.CHECKED, "timeout": 240}
"""Three turns: write, look, end."""
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def ran(proxy: RunningProxy, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run the task under a name and give the rows of results.jsonl."""

    def to_the_end(name: str, *more: str, agent: str = "command", status: int = 0) -> list[dict[str, Any]]:
        words = ["--agent", agent, *(["--command", SHELL_AGENT] if agent == "command" else [])]
        tasks = write_tasks(tmp_path / "tasks.jsonl", CHECKED)
        where = ["--run-dir", str(tmp_path / name), "--name", f"{tmp_path.name}-{name}", "--proxy", proxy.url]
        assert main(["run", str(tasks), *words, "--sandbox", "process", *where, *more]) == status
        return [] if status else results(tmp_path / name)

    return to_the_end


@pytest.fixture
def shared(proxy: RunningProxy) -> Pool:
    return open_pool(proxy.pool)


def replays(pool: Pool, name: str) -> list[list[bool]]:
    """By rollout, which of its calls were replayed."""
    rollouts = finished_rollouts(pool, find_run(pool, name).id)
    return [[item.replayed for item in rollout.completions] for rollout in rollouts]


@pytest.mark.parametrize("agent", ["command", pytest.param("mini-swe-agent", marks=pytest.mark.long)])
def test_an_agent_is_brought_to_its_third_call(
    agent: str, ran: Callable[..., list[dict[str, Any]]], shared: Pool, tmp_path: Path
) -> None:
    if agent != "command":
        need_agent(agent)
    ran("old", agent=agent)
    (row,) = ran("new", "--resample", f"{tmp_path.name}-old", agent=agent)
    assert (row["reward"], row["failure"], row["completions"], row["trainable"]) == (1.0, None, 3, 1), row
    assert replays(shared, f"{tmp_path.name}-new") == [[True, True, False]]
    now = account(shared, find_run(shared, f"{tmp_path.name}-new").id)
    assert now.unaccounted == 0 and now.sampled == row["sampled_tokens"] and now.replayed.tokens > now.sampled
    assert verify(shared).damages == []


def test_the_anchor_moves_back_while_all_is_solved(
    ran: Callable[..., list[dict[str, Any]]], shared: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran("old")
    capsys.readouterr()
    for epochs in range(1, 4):  # each time the same run goes on by one group
        rows = ran("new", "--resample", f"{tmp_path.name}-old", "-n", "8", "--epochs", str(epochs))
        out = capsys.readouterr().out
        assert "1 of 1 tasks have a success in the run" in out
    assert [row["reward"] for row in rows] == [1.0] * 24
    counts = [sum(some) for some in replays(shared, f"{tmp_path.name}-new")]
    lines = [line.split() for line in out.splitlines()]
    assert [line[2:] for line in lines if line[:1] == ["hello"] and len(line) == 6] == [
        [str(turns), "8", "8/8", "0"] for turns in (2, 1, 0)
    ]
    assert counts == [2] * 8 + [1] * 8 + [0] * 8
    ran("other", "--resample", "nothing", status=2)
    assert "run 'nothing' is not in the pool" in capsys.readouterr().err


def test_an_agent_that_makes_another_request_is_masked(
    ran: Callable[..., list[dict[str, Any]]], shared: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its second attempt on the agent gets another first message; a group of them is lost."""
    ran("old")
    monkeypatch.setattr("tests.harness.test_resample.SHELL_AGENT", f"export INSTRUCTION='Write bye.txt'; {SHELL_AGENT}")
    (row,) = ran("new", "--resample", f"{tmp_path.name}-old")
    assert (row["reward"], row["failure"], row["completions"], row["attempts"]) == (None, "replay_differed", 0, 1), row
    assert "this request is none of them: it differs from completion" in row["detail"]
    assert "hello.txt" in row["detail"] and "bye.txt" in row["detail"]
    (rollout,) = finished_rollouts(shared, find_run(shared, f"{tmp_path.name}-new").id)
    assert rollout.failure == "replay_differed"


def test_kill_9_of_the_harness_starts_its_rollouts_again_from_the_same_place(
    proxy: RunningProxy, ran: Callable[..., list[dict[str, Any]]], shared: Pool, tmp_path: Path
) -> None:
    """Its agents are killed behind their first call; each rollout is run again and replays the same two turns."""
    ran("old")
    name = f"{tmp_path.name}-new"
    agent = f"{SHELL_AGENT}; test -e {tmp_path}/open || sleep 800"
    tasks = write_tasks(tmp_path / "tasks.jsonl", CHECKED | {"timeout": 900})
    arguments = ["run", str(tasks), "--agent", "command", "--command", agent, "--sandbox", "process", "-n", "2"]
    arguments += ["--resample", f"{tmp_path.name}-old", "--run-dir", str(tmp_path / "new"), "--name", name]
    killed = start([*arguments, "--proxy", proxy.url])

    def calls() -> int:
        if name not in names(shared):
            return 0
        with shared.read() as connection:
            of_run = attempts.c.run_id == find_run(shared, name).id
            query = select(func.count()).select_from(completions).join(attempts).where(of_run)
            return connection.scalar(query) or 0

    wait_for(lambda: calls() == 6)
    killed.kill()
    killed.communicate()
    (tmp_path / "open").touch()
    assert main([*arguments, "--proxy", proxy.url]) == 0
    rows = results(tmp_path / "new")
    assert [(row["reward"], row["attempts"], row["trainable"]) for row in rows] == [(1.0, 2, 1)] * 2
    assert replays(shared, name) == [[True, True, False]] * 2
    now = account(shared, find_run(shared, name).id)
    assert now.unaccounted == 0 and now.left_out["retried"].tokens > 0
