"""The commands of a loop, each in a process of its own that can be killed, and what they need."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from proxy.engine.process import free_port
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import PoolError, UserError
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.steps import latest
from sandboxes.bundles import PYTHON

HERE = Path(__file__).parent
GROUPS, SIZE = 2, 4
FOR_EVER = 1_000_000
"""Steps of a run that is stopped by its test."""
CALLS_OFF = 2
"""The exit code of a command that says in one sentence why it cannot go on."""
AGAIN_SECONDS = 2.0
"""After so long such a command is started again. At once, it would take the cores from what it needs."""
ENDED = (0, CALLS_OFF, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes of commands that were interrupted. The trainer's launcher ends its ranks with SIGTERM."""
ENGINE = """pool = "{pool}"
[engine]
model = "model"
dtype = "float32"
context_length = 2048
port = {port}
"""
TRAINER = """pool = "{pool}"
run = "run"
model = "model"
output = "policy"
steps = {steps}
[batch]
groups = {groups}
[optimizer]
lr = 1e-4
[push]
engines = ["{engine}"]
"""


class Stage:
    """A loop in one directory: engine, proxy, a relay that notes answers, trainer and harness."""

    def __init__(self, directory: Path, pool: str = "pool.db", steps: int = FOR_EVER, docker: str = ""):
        """`docker`: the address of the daemon with the sandboxes; without it they are processes."""
        self.directory, self.pool_url, self.steps, self.docker = directory, pool, steps, docker
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.commands: dict[str, tuple[str, ...]] = {}
        self._ended_at: dict[str, float] = {}
        self.called_off: Counter[str] = Counter()
        """How often a command has said that it cannot go on, and was started again."""

    def start(self, name: str, *command: str) -> None:
        program = sys.executable if command[0] == "-m" else str(Path(sys.executable).parent / command[0])
        words = command if command[0] == "-m" else command[1:]
        self.commands[name] = command
        self._ended_at.pop(name, None)
        (self.directory / f"{name}.ready").unlink(missing_ok=True)
        with (self.directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [program, *words],
                cwd=self.directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
            )

    def url(self, name: str) -> str:
        ready = self.directory / f"{name}.ready"
        self.until(ready.exists, name)
        return str(json.loads(ready.read_text())["url"])

    def kill(self, name: str) -> None:
        """kill -9, as the kernel's out-of-memory killer would."""
        self.running[name].kill()
        self.running[name].wait()

    def again(self, name: str) -> None:
        """Start a command that has ended once more."""
        self.start(name, *self.commands[name])

    def until(self, reached: Callable[[], bool], name: str, seconds: float = 180) -> None:
        """Wait; whoever has said in one sentence why it cannot go on is started again, as its user would."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, f"{name} did not get there in {seconds} s: {self.told(name)}"
            for other, process in list(self.running.items()):
                if process.poll() == CALLS_OFF:
                    ended_at = self._ended_at.setdefault(other, time.monotonic())
                    if time.monotonic() > ended_at + AGAIN_SECONDS:
                        self.called_off[other] += 1
                        del self._ended_at[other]
                        self.again(other)
                assert not process.returncode or process.returncode == CALLS_OFF, f"{other} ended: {self.told(other)}"
            time.sleep(0.05)

    def told(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()[-3000:]

    def prepare(self, parallel: str = "") -> Pool:
        """Engine, proxy, relay, trainer and harness at work. `parallel`: more lines for the trainer's ranks."""
        verifier = {"command": "exit $(($$ % 2))"}
        task = {"id": "noise", "instruction": "say something", "verifier": verifier, "timeout": 60}
        task |= {"files": {"~/agent.py": (HERE / "calling_agent.py").read_text()}}
        (self.directory / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        (self.directory / "engine.toml").write_text(ENGINE.format(pool=self.pool_url, port=free_port()))
        self.start("model", "proxy", "tiny-model", "model")
        assert self.running.pop("model").wait() == 0
        self.start("engine", "proxy", "engine", "engine.toml", "--ready-file", "engine.ready")
        engine = self.url("engine")
        settings = TRAINER.format(pool=self.pool_url, steps=self.steps, groups=GROUPS, engine=engine)
        (self.directory / "trainer.toml").write_text(settings + parallel)
        (self.directory / "own").mkdir()
        port = str(free_port())
        serve = ["proxy", "serve", "engine.toml", "--engine", engine, "--port", port]
        serve += ["--sandbox-socket", str(self.directory / "own/proxy.sock")]
        self.start("proxy", *serve, "--ready-file", "proxy.ready")
        relay = ("-m", "tests.survival.acknowledging_relay", self.url("proxy"), str(self.directory))
        self.start("relay", *relay)
        self.start("trainer", "trainer", "launch", "trainer.toml")
        self.start("harness", *self._feed(self.url("relay")))
        return open_pool(str(self.directory / "pool.db") if self.pool_url == "pool.db" else self.pool_url)

    def _feed(self, proxy: str) -> list[str]:
        python = PYTHON if self.docker else sys.executable
        where = ["--sandbox", "docker", "--docker", self.docker, "--image", "bb:1"]
        more = ["-n", str(SIZE), "--concurrency", "4", "--until-step", str(self.steps), "--run-dir", "run"]
        more += ["--proxy", proxy, "--pool", self.pool_url, *(where if self.docker else ["--sandbox", "process"])]
        return ["harness", "run", "tasks.jsonl", "--agent", "command", "--command", f"{python} -I -S ~/agent.py", *more]

    def end(self) -> None:
        """Interrupt harness and trainer, as Ctrl-C does, and wait until they have cleaned up."""
        for name in ("harness", "trainer"):
            process = self.running.pop(name)
            process.send_signal(signal.SIGINT)
            assert process.wait(180) in ENDED, self.told(name)

    def close(self) -> None:
        for process in reversed(self.running.values()):
            process.terminate()
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
                continue
            os.killpg(process.pid, signal.SIGKILL)


def step(pool: Pool) -> int:
    """The last published step; -1 while there is none, or while the database is away."""
    try:
        version = latest(pool, find_run(pool, "run").id)
    except (UserError, PoolError):
        return -1
    return -1 if version is None else version.step
