"""The whole loop with real SGLang and the real trainer, while every process of it is killed with -9 and started again.

Held: no acknowledged completion is lost, every published step trained its own groups once, nothing is left running.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from sqlalchemy import func, select

from proxy.engine.process import free_port
from proxy.pool.completions.store import of_attempt, paths
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import by_key
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import attempts, completions, groups, proxies, rollouts
from proxy.pool.tokenizer_fingerprint import fingerprint
from proxy.pool.training.steps import latest, metrics
from tests.conftest import need
from tests.ranks import ranks_of

HERE = Path(__file__).parent
STEPS, GROUPS, SIZE = 5, 2, 4
COLUMNS = (completions.c.versions, completions.c.sampled, completions.c.untrainable)
HELD = rollouts.c.attempt_id == completions.c.attempt_id
AGENT = f"{sys.executable} -I -S {HERE / 'acknowledging_agent.py'}"

ENGINE_COMMAND = ("proxy", "engine", "engine.toml", "--ready-file", "engine.ready")
ENGINE = 'pool = "pool.db"\n[engine]\nmodel = "model"\ndtype = "float32"\ncontext_length = 2048\nport = {port}\n'
TRAINER = f"""
pool = "pool.db"
run = "run"
model = "model"
output = "policy"
steps = {STEPS}
[batch]
groups = {GROUPS}
[optimizer]
lr = 1e-4
"""
SPLITS = {"tensor": "[parallel]\nprocesses = 2\ntensor = 2\n", "data": "[parallel]\nprocesses = 2\n"}
"""Two ranks, as a section of the trainer's file."""


class Stage:
    """The commands of a loop, each by name, all in one directory."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> None:
        program = str(Path(sys.executable).parent / command[0])
        with (self.directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [program, *command[1:]],
                cwd=self.directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},  # engine, proxy and ranks share two cores
            )

    def url(self, name: str) -> str:
        ready = self.directory / f"{name}.ready"
        self.until(ready.exists, name)
        return str(json.loads(ready.read_text())["url"])

    def kill(self, name: str) -> None:
        """kill -9, as the kernel's out-of-memory killer would."""
        self.running[name].send_signal(signal.SIGKILL)
        self.running[name].wait()

    def until(self, reached: Callable[[], bool], name: str, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            end = (self.directory / f"{name}.log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"{name} did not get there in {seconds} s: {end}"
            assert not self.running[name].poll(), f"{name} ended with {self.running[name].returncode}: {end}"
            time.sleep(0.05)

    def repeat(self, name: str, *command: str) -> None:
        """Start a command again if it has ended with a sentence to its user."""
        if self.running[name].poll() is not None:
            assert self.running[name].returncode == 2
            self.start(name, *command)

    def close(self) -> None:
        for process in reversed(self.running.values()):
            process.terminate()
        for process in self.running.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    need("sglang and megatron-core", find_spec("sglang") is not None and find_spec("megatron") is not None)
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def step(pool: Pool) -> int:
    try:
        version = latest(pool, find_run(pool, "run").id)
    except UserError:  # the trainer has not opened its run yet
        return -1
    return -1 if version is None else version.step


def prepare(stage: Stage, parallel: str = "") -> Pool:
    """Engine, proxy and trainer at work, waiting for rollouts. `parallel`: more lines for the trainer's ranks."""
    task = {"id": "noise", "instruction": "say something", "verifier": {"command": "exit $(($$ % 2))"}, "timeout": 60}
    (stage.directory / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    (stage.directory / "engine.toml").write_text(ENGINE.format(port=free_port()))
    stage.start("model", "proxy", "tiny-model", "model")
    assert stage.running["model"].wait() == 0
    stage.start("engine", *ENGINE_COMMAND)
    engine = stage.url("engine")
    (stage.directory / "trainer.toml").write_text(TRAINER + parallel + f'[push]\nengines = ["{engine}"]\n')
    stage.start("proxy", *serve(engine))
    stage.url("proxy")
    stage.start("trainer", "trainer", "launch", "trainer.toml")
    return open_pool(str(stage.directory / "pool.db"))


def serve(engine: str, port: str = "0") -> list[str]:
    return ["proxy", "serve", "engine.toml", "--engine", engine, "--port", port, "--ready-file", "proxy.ready"]


def feed(stage: Stage, proxy: str) -> list[str]:
    agent = f"env ACK_FILE={stage.directory / 'acks'} {AGENT}"
    more = ["-n", str(SIZE), "--concurrency", "4", "--until-step", str(STEPS), "--run-dir", "run", "--proxy", proxy]
    more += ["--sandbox", "process"]
    return ["harness", "run", "tasks.jsonl", "--agent", "command", "--command", agent, *more]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine_too", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "engine"])
def test_every_process_may_be_killed_and_the_run_goes_on(engine_too: bool, stage: Stage) -> None:
    pool = prepare(stage)
    engine, proxy = stage.url("engine"), stage.url("proxy")
    stage.start("harness", *feed(stage, proxy))

    stage.until(lambda: step(pool) >= 1, "harness")
    stage.kill("trainer")
    stage.start("trainer", "trainer", "launch", "trainer.toml")

    stage.until(lambda: step(pool) >= 2, "trainer")
    stage.kill("proxy")
    (stage.directory / "proxy.ready").unlink()
    stage.start("proxy", *serve(engine, proxy.rsplit(":", 1)[1]))
    stage.url("proxy")

    stage.kill("harness")
    stage.start("harness", *feed(stage, proxy))

    stage.until(lambda: step(pool) >= 3, "trainer")
    if engine_too:
        stage.kill("engine")
        (stage.directory / "engine.ready").unlink()
        stage.start("engine", *ENGINE_COMMAND)
        stage.url("engine")
    while step(pool) < STEPS:  # who met the dead engine has said so in one sentence, and is repeated
        stage.repeat("harness", *feed(stage, proxy))
        stage.repeat("trainer", "trainer", "launch", "trainer.toml")
        time.sleep(0.2)
    stage.until(lambda: step(pool) >= STEPS, "trainer")
    stage.until(lambda: stage.running["harness"].poll() == 0, "harness")
    stage.until(lambda: stage.running["trainer"].poll() == 0, "trainer")

    check_tokenizer(pool, stage.directory / "model")
    check_acknowledged(pool, stage.directory / "acks")
    check_trained_once(pool)
    check_nothing_left(stage, pool)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_learn_from_a_running_engine_and_one_may_be_killed(split: str, stage: Stage) -> None:
    pool = prepare(stage, SPLITS[split])
    stage.start("harness", *feed(stage, stage.url("proxy")))
    stage.until(lambda: step(pool) >= 2, "trainer")
    os.kill(ranks_of(stage.running["trainer"].pid)[1], signal.SIGKILL)
    assert stage.running["trainer"].wait(60) == 128 + signal.SIGKILL
    stage.start("trainer", "trainer", "launch", "trainer.toml")
    stage.until(lambda: step(pool) >= STEPS, "trainer", seconds=600)
    stage.until(lambda: stage.running["harness"].poll() == 0, "harness")
    stage.until(lambda: stage.running["trainer"].poll() == 0, "trainer")
    check_acknowledged(pool, stage.directory / "acks")
    check_trained_once(pool)
    check_versions(pool)
    check_nothing_left(stage, pool)


def check_versions(pool: Pool) -> None:
    """Each step's weights reached the engine: what the last step trained on was sampled by new ones."""
    of_last = (groups.c.state == "CONSUMED") & (groups.c.step == STEPS)
    query = select(completions.c.versions).join_from(completions, rollouts, HELD).join(groups).where(of_last)
    with pool.read() as connection:
        names = {name for versions in connection.scalars(query) for name, _, _ in versions}
    assert max(int(name.removeprefix("v")) for name in names) > STEPS - 4


def check_tokenizer(pool: Pool, model: Path) -> None:
    """The pool knows whose tokens it holds."""
    with pool.read() as connection:
        assert set(connection.scalars(select(proxies.c.tokenizer))) == {fingerprint(model)} != {None}


def check_acknowledged(pool: Pool, acks: Path) -> None:
    """Every answer that an agent got stands in the pool, with the tokens that it was made of."""
    noted = [json.loads(line) for line in acks.read_text().splitlines()]
    assert len(noted) >= STEPS * GROUPS * SIZE
    delivered: dict[str, Counter[str]] = {}
    for ack in noted:
        delivered.setdefault(ack["key"], Counter())[ack["content"]] += 1
    for key, contents in delivered.items():
        attempt = by_key(pool, key)
        assert attempt is not None
        recorded = of_attempt(pool, attempt.id)
        paths(recorded)  # raises when a checksum is off
        assert contents <= Counter(item.reply["content"] for item in recorded)


def check_trained_once(pool: Pool) -> None:
    """Each step consumed its own groups, and the tokens that the trainer says it trained are theirs."""
    run_id = find_run(pool, "run").id
    with pool.read() as connection:
        query = select(groups.c.step, func.count()).where(groups.c.state == "CONSUMED").group_by(groups.c.step)
        consumed = {number: count for number, count in connection.execute(query)}
    assert consumed == {number: GROUPS for number in range(1, STEPS + 1)}
    steps = metrics(pool, run_id)
    assert [row["step"] for row in steps] == list(range(STEPS + 1))
    for row in steps[1:]:
        trained, sampled = expected_tokens(pool, row["step"])
        assert row["trained_tokens"] == trained
        assert row["trained_tokens"] + sum(row["excluded_tokens"].values()) == sampled


def expected_tokens(pool: Pool, number: int) -> tuple[int, int]:
    """Of a step's groups: tokens to train, and all sampled tokens.

    What an engine sampled between its restart and the next push is of no version of this run and not trained; nor is a
    group whose remaining rewards are all equal.
    """
    query = (
        select(groups.c.id.label("group"), rollouts.c.id.label("rollout"), rollouts.c.reward, *COLUMNS)
        .join_from(completions, attempts)
        .join(rollouts, rollouts.c.attempt_id == attempts.c.id)
        .join(groups, groups.c.id == rollouts.c.group_id)
        .where(groups.c.step == number)
    )
    with pool.read() as connection:
        rows = connection.execute(query).all()
    foreign = {
        row.rollout for row in rows if row.untrainable is None and any(v == "initial" for v, _, _ in row.versions)
    }
    valid = [row for row in rows if row.reward is not None and row.rollout not in foreign]
    rewards: dict[int, set[float]] = {}
    for row in valid:
        rewards.setdefault(row.group, set()).add(row.reward)
    counted = [row for row in valid if row.untrainable is None and len(rewards[row.group]) > 1]
    return sum(len(row.sampled) // 4 for row in counted), sum(len(row.sampled) // 4 for row in rows)


def check_nothing_left(stage: Stage, pool: Pool) -> None:
    """No open attempt, and no sandbox of this run."""
    with pool.read() as connection:
        assert connection.scalar(select(func.count()).where(attempts.c.closed_at.is_(None))) == 0
    stage.start("ls", "sandboxes", "ls")
    assert stage.running["ls"].wait() == 0
    assert str(stage.directory) not in (stage.directory / "ls.log").read_text()
