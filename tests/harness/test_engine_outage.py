"""The only engine is killed with -9 in mid-rollout: the run waits for it, loses no attempt, and ends when told to."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from sqlalchemy import func, select

from harness.cli import main
from harness.setup.stack import RunningProxy
from proxy.engine.process import free_port
from proxy.pool.database import Pool, open_pool
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import attempts, completions
from proxy.pool.training.steps import Published, publish
from tests.conftest import need
from tests.harness.conftest import HELLO, ROOT, SHELL_AGENT, results, write_tasks

SCRIPT = """
from pathlib import Path
from proxy.engine.scripted import ScriptedReply
from tests.harness.scripts import hello

def answer(prompt, ids):
    Path("asked").touch()
    return ScriptedReply(hello(prompt, ids), seconds_per_token=0.02)
"""
LIMIT = 10
"""Seconds that an agent may take, and be silent."""


class Stack:
    """An engine and a proxy, each a process of its own in one directory."""

    def __init__(self, directory: Path, model: Path):
        self.directory = directory
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (directory / "script.py").write_text(SCRIPT)
        (directory / "proxy.toml").write_text(f'[engine]\nmodel = "{model}"\nport = {free_port()}\n')

    def start(self, name: str, *words: str) -> str:
        """Start `proxy` with these words; return its URL."""
        ready = self.directory / f"{name}.ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "proxy", *words, "--ready-file", str(ready)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with (self.directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, cwd=self.directory, env=environment, stdout=log, stderr=log)
        wait_for(ready.exists)
        return str(json.loads(ready.read_text())["url"])

    def start_engine(self) -> str:
        return self.start("engine", "engine", "proxy.toml", "--scripted", "script.py:answer")

    def kill(self, name: str) -> None:
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def kill_engine_at_work(self) -> None:
        asked = self.directory / "asked"
        asked.unlink(missing_ok=True)
        wait_for(asked.exists)
        self.kill("engine")


@pytest.fixture
def stack(tmp_path: Path, proxy: RunningProxy) -> Iterator[Stack]:
    stack = Stack(tmp_path, model_of(proxy))
    yield stack
    for name in list(stack.running):
        stack.kill(name)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_real_engine_that_is_killed_gets_its_weights_back_and_costs_no_attempt(stack: Stack, tmp_path: Path) -> None:
    """No trainer is there. The weights of the published version are those of the model; their name tells them apart."""
    need("SGLang", find_spec("sglang") is not None)
    model, seconds = re.search('model = "(.*)"', (tmp_path / "proxy.toml").read_text()), 60
    assert model is not None
    with (tmp_path / "proxy.toml").open("a") as config:
        config.write('dtype = "float32"\ncontext_length = 2048\n')
    engine = stack.start("engine", "engine", "proxy.toml")
    proxy = stack.start("proxy", "serve", "proxy.toml", "--engine", engine)
    pool = open_pool(str(tmp_path / "pool.db"))
    done = Published(step=0, checkpoint="", hf_dir=model[1], metrics={})
    version = publish(pool, open_run(pool, "trained", "train", {}).id, done).name
    push = json.dumps({"model_path": model[1], "weight_version": version}).encode()
    urlopen(Request(f"{engine}/update_weights_from_disk", push, {"Content-Type": "application/json"})).close()
    wait_for(lambda: json.load(urlopen(f"{proxy}/health"))["replicas"][0]["version"] == version)

    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"timeout": seconds, "verifier": {"command": "true"}})
    agent = f"{sys.executable} -I -S {ROOT / 'tests/survival/calling_agent.py'}"
    command = ["run", str(tasks), "--agent", "command", "--command", agent, "--sandbox", "process", "-n", "8"]
    command += ["--run-dir", str(tmp_path / "run"), "--proxy", proxy]
    running = subprocess.Popen([sys.executable, "-m", "harness", *command], cwd=ROOT)
    wait_for(lambda: recorded(pool) > 0)
    stack.kill("engine")
    time.sleep(seconds + 5)
    stack.start("engine", "engine", "proxy.toml")
    assert running.wait(900) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] * 8
    with pool.read() as connection:
        tries = connection.execute(select(attempts.c.failure, attempts.c.timings)).all()
        spans = [span for versions in connection.scalars(select(completions.c.versions)) for span in versions]
    assert [attempt.failure for attempt in tries] == [None] * 8
    assert max(attempt.timings.get("engine_away", 0) for attempt in tries) > seconds
    assert {name for name, _, _ in spans} == {version}
    assert verify(pool).damages == [] and recorded(pool) >= 8 * 3


def recorded(pool: Pool) -> int:
    with pool.read() as connection:
        return connection.scalar(select(func.count()).select_from(completions)) or 0


def model_of(proxy: RunningProxy) -> Path:
    return Path(proxy.pool.removeprefix("sqlite:///")).parent / "model"


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_starts_its_own_engine_again(tmp_path: Path, proxy: RunningProxy) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace('"asked"', repr(str(tmp_path / "asked"))))
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO)
    command = ["run", str(tasks), "--agent", "command", "--command", SHELL_AGENT, "--sandbox", "process"]
    command += ["--run-dir", str(tmp_path / "run"), "--scripted", f"{tmp_path / 'script.py'}:answer"]
    command += ["--model", str(model_of(proxy))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen([sys.executable, "-m", "harness", *command], cwd=ROOT, env=environment)
    wait_for((tmp_path / "asked").exists)
    os.kill(json.loads((tmp_path / "run/logs/engine.ready").read_text())["pid"], signal.SIGKILL)
    assert running.wait(300) == 0
    [row] = results(tmp_path / "run")
    assert (row["reward"], row["attempts"]) == (1.0, 1)


@pytest.mark.long  # tests/proxy/test_outage.py holds what a call waits for
@pytest.mark.timeout(900)
def test_a_run_waits_for_its_engine_and_its_clocks_stand_still(stack: Stack, tmp_path: Path) -> None:
    engine = stack.start_engine()
    proxy = stack.start("proxy", "serve", "proxy.toml", "--engine", engine)
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"timeout": LIMIT})
    command = ["run", str(tasks), "--agent", "command", "--command", SHELL_AGENT, "--sandbox", "process"]
    command += ["--run-dir", str(tmp_path / "run"), "--proxy", proxy, "-n", "3", "--hung-seconds", str(LIMIT)]

    def start(*more: str) -> "subprocess.Popen[str]":
        arguments = [sys.executable, "-m", "harness", *command, *more]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    impatient = start("--engine-patience", "3")
    stack.kill_engine_at_work()
    output, _ = impatient.communicate(timeout=300)
    assert impatient.returncode == 2 and output.count("repeat the same command to go on") == 1
    assert f"the engine at {engine} has been away for " in output and "Traceback" not in output

    patient = start()  # the engine is away when it starts, and again later
    assert patient.stdout is not None
    assert next((line for line in patient.stdout if "waiting: the engine at" in line), "")
    stack.start_engine()
    stack.kill_engine_at_work()
    killed = time.monotonic()
    seen = next((line for line in patient.stdout if "waiting: the engine at" in line), "")
    assert f"waiting: the engine at {engine} has been away for " in seen
    time.sleep(max(0.0, killed + 16 - time.monotonic()))  # longer than the agent's limits, and than three tries
    stack.start_engine()
    output, _ = patient.communicate(timeout=300)
    assert patient.returncode == 0, output
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] * 3
    with open_pool(str(tmp_path / "pool.db")).read() as connection:
        rows = connection.execute(select(attempts.c.failure, attempts.c.timings).order_by(attempts.c.id)).all()
    ended = Counter(row.failure for row in rows)
    assert ended[None] == 3 and set(ended) == {None, "interrupted"}
    waited = [row.timings for row in rows if row.failure is None and "engine_away" in row.timings]
    assert waited and all(timings["engine_away"] < timings["agent"] for timings in waited)
    assert max(timings["engine_away"] for timings in waited) > LIMIT
    assert main(command) == 0  # nothing is left to do
