"""Whole runs through the console script: results, resuming after kill -9 and Ctrl-C, admission, and bad input."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, update

from harness.cli import main
from harness.setup.stack import RunningProxy
from proxy.pool.database import Pool, open_pool
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.attempts import Attempt, closed_among, open_attempt
from proxy.pool.rollouts.groups import open_rollouts
from proxy.pool.rollouts.runs import find_run, set_queue_limit
from proxy.pool.schema import attempts, groups, rollouts, runs
from proxy.pool.training.steps import Published
from sandboxes.local.leftovers import remove_orphans
from sandboxes.local.processes import table
from tests.harness.conftest import HELLO, SHELL_AGENT, push, results, write_tasks
from tests.pool.full_disk import full_disk
from tests.pool.make import publish_next
from tests.postgres import Server

CommandLine = Callable[..., list[str]]
PLAIN = ["--sandbox", "process"]
PATIENT = HELLO | {"timeout": 900}
"""A task whose agent may wait for the test, however busy the machine is."""
pytestmark = pytest.mark.timeout(900)


def gated(directory: Path, passing: int) -> str:
    """An agent of which only the first `passing` end, until the file `open` is there."""
    places = " || ".join(f"mkdir {directory}/passed-{number} 2>&-" for number in range(passing))
    return f"{SHELL_AGENT}; test -e {directory}/open || {places} || sleep 800"


@pytest.fixture
def pool(proxy: RunningProxy) -> Iterator[Pool]:
    opened = open_pool(proxy.pool)
    yield opened
    opened.close()


def start(arguments: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-m", "harness", *arguments], stdout=subprocess.PIPE, text=True, stderr=-2)


def wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def finished(pool: Pool, name: str) -> int:
    query = select(rollouts.c.id).join(groups, groups.c.id == rollouts.c.group_id)
    with pool.read() as connection:
        return len(connection.execute(query.where(rollouts.c.finished_at.is_not(None), in_run(pool, name))).all())


def in_run(pool: Pool, name: str) -> Any:
    return groups.c.run_id == find_run(pool, name).id


def sandboxes_of(pid: int) -> list[int]:
    return [process.pid for process in table() if process.sandbox.startswith(f"{pid}-")]


def test_every_task_gets_its_group_and_the_results_are_on_file(run: Callable[..., list[dict[str, Any]]]) -> None:
    tasks = [HELLO | {"id": "a"}, HELLO | {"id": "b", "verifier": {"command": "false"}}]
    rows = run("-n", "2", "--concurrency", "3", tasks=tasks)
    assert Counter((row["task"], row["reward"]) for row in rows) == {("a", 1.0): 2, ("b", 0.0): 2}
    assert all(row["completions"] == row["trainable"] == 2 and row["agent"] == "command" for row in rows)


def test_a_finished_run_repeats_nothing(
    run: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    first = run("--epochs", "2")
    assert len(first) == 2
    assert run("--epochs", "2") == first
    assert capsys.readouterr().out.count("2/2 rollouts, 0 running, mean reward 1.000 of 2") == 2
    assert len(run("--epochs", "3")) == 3


def test_kill_9_is_resumed_with_every_rollout_finished_once(
    command_line: CommandLine, tmp_path: Path, pool: Pool
) -> None:
    agent = f"setsid sleep 600 & {gated(tmp_path, 2)}"
    arguments = command_line("-n", "8", "--concurrency", "3", tasks=[PATIENT], command=agent)
    killed = start(arguments)
    wait_for(lambda: f"{tmp_path.name}" in names(pool) and finished(pool, tmp_path.name) >= 2)
    killed.kill()
    killed.communicate()
    assert sandboxes_of(killed.pid) != []
    (tmp_path / "open").touch()
    assert main(arguments) == 0
    assert sandboxes_of(killed.pid) == []
    rows = results(tmp_path / "run")
    assert [row["reward"] for row in rows] == [1.0] * 8 and {row["group"] for row in rows} == {0}
    ended = Counter(failures(pool, tmp_path.name))
    assert set(ended) <= {None, "interrupted"} and ended.total() == sum(row["attempts"] for row in rows) > 8


def names(pool: Pool) -> list[str]:
    with pool.read() as connection:
        return list(connection.scalars(select(runs.c.name)))


def failures(pool: Pool, name: str) -> list[str | None]:
    with pool.read() as connection:
        query = select(attempts.c.failure).where(attempts.c.run_id == find_run(pool, name).id)
        return list(connection.scalars(query))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_stop_is_clean_and_resumable(
    command_line: CommandLine, tmp_path: Path, pool: Pool, number: signal.Signals
) -> None:
    arguments = command_line("-n", "6", "--concurrency", "2", tasks=[PATIENT], command=gated(tmp_path, 1))
    stopped = start(arguments)
    wait_for(lambda: f"{tmp_path.name}" in names(pool) and finished(pool, tmp_path.name) >= 1)
    stopped.send_signal(number)
    output, _ = stopped.communicate(timeout=300)
    assert stopped.returncode == 130 and "stopped; repeat the same command to go on" in output
    assert sandboxes_of(stopped.pid) == [] and "interrupted" in failures(pool, tmp_path.name)
    (tmp_path / "open").touch()
    assert main(arguments) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] * 6


def test_until_step_waits_for_weights_feeds_the_queue_and_stops(
    command_line: CommandLine, tmp_path: Path, pool: Pool, proxy: RunningProxy
) -> None:
    run_id = None

    def train() -> None:
        nonlocal run_id
        wait_for(lambda: tmp_path.name in names(pool))
        run_id = find_run(pool, tmp_path.name).id
        time.sleep(0.5)
        assert opened(pool, run_id) == 0  # no weights, no rollouts
        set_queue_limit(pool, run_id, 3)
        push(proxy, publish_next(pool, run_id, weights(0)).name)
        wait_for(lambda: opened(pool, run_id) == 3)
        time.sleep(0.5)
        assert opened(pool, run_id) == 3  # the queue is full, nobody trains
        publish_next(pool, run_id, weights(1))

    trainer = threading.Thread(target=train)
    trainer.start()
    assert main(command_line("-n", "2", "--until-step", "1")) == 0
    trainer.join()
    assert run_id is not None and opened(pool, run_id) == 3


def weights(step: int) -> Published:
    return Published(step=step, checkpoint="none", hf_dir="none", metrics={})


def opened(pool: Pool, run_id: int) -> int:
    with pool.read() as connection:
        return len(connection.execute(select(groups.c.id).where(groups.c.run_id == run_id)).all())


def test_an_evaluation_is_of_another_purpose(command_line: CommandLine, tmp_path: Path, pool: Pool) -> None:
    assert main(["eval", *command_line()[1:]]) == 0
    assert find_run(pool, tmp_path.name).purpose == "eval"


@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--agent", "gpt-cli"], "the agent 'gpt-cli' is unknown; choose one of: command, mini-swe-agent, opencode"),
        (["--agent", "opencode"], "--command goes with the agent 'command' only"),
        (["--proxy", "http://127.0.0.1:9"], "the proxy http://127.0.0.1:9 does not answer"),
        (["--command", ""], "give --command 'CMD'"),
    ],
)
def test_bad_arguments_are_one_sentence(
    command_line: CommandLine, capsys: pytest.CaptureFixture[str], more: list[str], sentence: str
) -> None:
    assert main(command_line(*more)) == 2
    assert sentence in capsys.readouterr().err


def test_an_agent_that_is_not_installed_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BLACKFORGE_AGENTS", str(tmp_path))
    assert main(["run", str(write_tasks(tmp_path / "tasks.jsonl", HELLO)), "--agent", "opencode"]) == 2
    assert "harness agents install opencode" in capsys.readouterr().err


def test_another_configuration_is_refused(
    run: Callable[..., Any], command_line: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    run()
    assert main(command_line("-n", "2")) == 2
    assert "was started with group_size 1, now it is 2; repeat the old setting" in capsys.readouterr().err


def test_a_first_try_that_could_not_start_binds_nobody(
    run: Callable[..., Any], command_line: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as mute:  # speaks no HTTP
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        threading.Thread(target=lambda: mute.accept()[0].sendall(b"SSH-2.0\r\n"), daemon=True).start()
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        assert main(command_line("-n", "2", "--proxy", url)) == 2
    assert f"the proxy {url} does not answer (no whole HTTP answer" in capsys.readouterr().err
    assert len(run("-n", "3")) == 3


@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--reward", "x:y"], "No module named 'x'"),
        (["--integrity", "tell", "--integrity-judge", "missing.toml"], "missing.toml"),
        (["--ray", "auto"], "is a file of this machine, which a cluster's nodes cannot write"),
    ],
)
def test_what_cannot_be_used_binds_nobody(
    run: Callable[..., Any],
    command_line: CommandLine,
    tmp_path: Path,
    pool: Pool,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    sentence: str,
) -> None:
    assert main(command_line("-n", "2", *more)) == 2
    assert sentence in capsys.readouterr().err and tmp_path.name not in names(pool)
    assert len(run("-n", "3")) == 3


def test_a_directory_in_use_is_refused(command_line: CommandLine, capfd: pytest.CaptureFixture[str]) -> None:
    user = start(command_line(tasks=[PATIENT], command=f"{SHELL_AGENT}; sleep 800"))
    try:
        wait_for(lambda: bool(sandboxes_of(user.pid)))
        assert main(command_line()) == 2
        assert f"is in use by process {user.pid}" in capfd.readouterr().err
    finally:
        user.terminate()
        user.communicate()


def test_a_run_at_work_in_another_directory_is_refused_until_its_harness_is_gone(
    command_line: CommandLine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    user = start(command_line(tasks=[PATIENT], command=f"{SHELL_AGENT}; sleep 800"))
    elsewhere = ["--run-dir", str(tmp_path / "elsewhere"), "--command", f"{SHELL_AGENT}; sleep 800"]
    try:
        wait_for(lambda: bool(sandboxes_of(user.pid)))
        assert main(command_line(*elsewhere, tasks=[PATIENT])) == 2
        assert f"run '{tmp_path.name}' of the pool" in (error := capfd.readouterr().err)
        assert f"is in use by process {user.pid}" in error and error.count("\n") == 1
    finally:
        user.kill()
        user.communicate()
    successor = start(command_line(*elsewhere, tasks=[PATIENT]))
    wait_for(lambda: bool(sandboxes_of(successor.pid)))
    successor.terminate()
    successor.communicate()
    assert successor.returncode == 130


def test_a_harness_that_was_replaced_ends_its_own_agents_only_and_says_so(
    command_line: CommandLine, tmp_path: Path, pool: Pool
) -> None:
    replaced = start(command_line(tasks=[PATIENT], command=f"{SHELL_AGENT}; sleep 800"))
    wait_for(lambda: bool(sandboxes_of(replaced.pid)))
    theirs = taken_over(pool, find_run(pool, tmp_path.name).id)
    output, _ = replaced.communicate(timeout=300)
    assert replaced.returncode == 2 and "another harness has taken over run" in output
    assert sandboxes_of(replaced.pid) == [] and closed_among(pool, [theirs.id]) == set()


def taken_over(pool: Pool, run_id: int) -> Attempt:
    """Give a run with one rollout to a harness elsewhere, which opens an attempt at it."""
    with pool.write() as connection:
        owner = connection.scalars(select(runs.c.owner).where(runs.c.id == run_id)).one()
        elsewhere = owner | {"token": "another", "machine": "elsewhere"}
        connection.execute(update(runs).where(runs.c.id == run_id).values(owner=elsewhere))
    [rollout] = open_rollouts(pool, run_id)
    return open_attempt(pool, rollout.rollout_id, "command")[0]


def test_a_run_works_on_postgresql(tmp_path: Path, postgres_server: Server) -> None:
    database = postgres_server.database()
    script = f"{Path(__file__).parent / 'scripts.py'}:hello"
    what = [str(write_tasks(tmp_path / "tasks.jsonl", HELLO)), "--agent", "command", "--command", SHELL_AGENT, *PLAIN]
    assert main(["run", *what, "--run-dir", str(tmp_path / "run"), "--scripted", script, "--pool", database]) == 0
    [row] = results(tmp_path / "run")
    assert (row["reward"], row["completions"], row["attempts"]) == (1.0, 2, 1)
    assert verify(open_pool(database)).damages == []


def test_what_a_run_brings_up_goes_down_with_it(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO)
    script = f"{Path(__file__).parent / 'scripts.py'}:hello"
    arguments = ["--agent", "command", "--command", SHELL_AGENT, "--scripted", script, *PLAIN]
    assert main(["run", str(tasks), "--run-dir", str(tmp_path / "run"), *arguments]) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0]
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if str(tmp_path) in command_of(pid)]


def test_what_a_killed_harness_brought_up_dies_with_it(tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", PATIENT)
    script = f"{Path(__file__).parent / 'scripts.py'}:hello"
    agent = ["--agent", "command", "--command", f"{SHELL_AGENT}; sleep 800", "--scripted", script, *PLAIN]
    killed = start(["run", str(tasks), "--run-dir", str(tmp_path / "run"), *agent])
    wait_for(lambda: bool(sandboxes_of(killed.pid)))
    killed.kill()
    killed.communicate()
    wait_for(lambda: not [pid for pid in Path("/proc").glob("[0-9]*") if str(tmp_path / "run") in command_of(pid)])
    remove_orphans()  # the next start does this
    assert sandboxes_of(killed.pid) == []


def command_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


def test_an_engine_that_cannot_start_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO)
    arguments = ["--agent", "command", "--command", "true", "--scripted", "missing.py:no", *PLAIN]
    assert main(["run", str(tasks), "--run-dir", str(tmp_path / "run"), *arguments]) == 2
    assert "`proxy engine` did not start (ended with 2: the script 'missing.py:no'" in capsys.readouterr().err


def test_a_full_disk_ends_a_run_with_one_sentence_and_it_goes_on_later(
    command_line: CommandLine, tmp_path: Path, pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = f"mkdir {tmp_path}/first 2>&- || until test -e {tmp_path}/full; do sleep 0.1; done"
    arguments = command_line("-n", "12", "--concurrency", "2", tasks=[PATIENT], command=f"{SHELL_AGENT}; {waits}")

    def fill_up(stack: ExitStack) -> None:
        wait_for(lambda: f"{tmp_path.name}" in names(pool) and finished(pool, tmp_path.name) >= 1)
        stack.enter_context(full_disk())
        (tmp_path / "full").touch()

    with ExitStack() as stack:
        filling = threading.Thread(target=fill_up, args=(stack,))
        filling.start()
        assert main(arguments) == 2
        filling.join()
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: the pool ") and "refused a write (database or disk is full); free space" in said
    assert 1 <= finished(pool, tmp_path.name) < 12
    assert main(arguments) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] * 12 and verify(pool).damages == []
