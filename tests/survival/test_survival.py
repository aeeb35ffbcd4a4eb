"""Real engine, proxy, trainer, harness, database and Docker daemon are killed with -9, again and again.

Held at the end: every acknowledged answer is in the pool, the pool verifies, every sampled token is accounted for and
has weights of the run, every published step trained its own groups once, and nothing is left running. With
BLACKFORGE_SURVIVAL=FILE.json, what the hundreds measured goes to that file.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import func, select

from proxy.pool.database import Pool
from proxy.pool.errors import PoolError
from proxy.pool.inspect.account import account
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import attempts, completions
from tests import postgres
from tests.conftest import need
from tests.daemons import OwnDaemon, own_daemon
from tests.ranks import ranks_of
from tests.survival import checks
from tests.survival.stage import Stage, step

SPLITS = {"tensor": "[parallel]\nprocesses = 2\ntensor = 2\n", "data": "[parallel]\nprocesses = 2\n"}
"""Two ranks, as a section of the trainer's file."""
STEPS_OF_RANKS = 5
PROCESSES = ("proxy", "harness", "trainer", "engine")
ONE_EACH = [["engine", "trainer", "harness", "proxy"]]
TEN = [["proxy", "harness", "trainer"], *ONE_EACH, ["harness", "proxy", "trainer"]]
KILLS_IN_A_ROUND = 10
"""More than there are processes, so that some die while they start again."""
ROUNDS_OF_A_STEP = 2
"""After so many rounds the trainer comes to a new step; the others may kill it in any part of one."""
PAUSE_SECONDS = 2.0
"""At most so much time is between two kills of a round, and half of them come at once, so that restarts overlap."""


@pytest.fixture
def exits() -> Iterator[ExitStack]:
    need("sglang and megatron-core", find_spec("sglang") is not None and find_spec("megatron") is not None)
    with ExitStack() as stack:
        yield stack


def set_up(directory: Path, database: str, exits: ExitStack) -> tuple[Stage, dict[str, OwnDaemon | postgres.Server]]:
    """A loop on a database and a Docker daemon of its own, and those of them that can be killed."""
    daemon = exits.enter_context(own_daemon())
    others: dict[str, OwnDaemon | postgres.Server] = {"docker": daemon}
    url = "pool.db"
    if database == "postgres":
        installed = postgres.binaries()
        need("PostgreSQL (apt-get install postgresql; pip install blackforge[postgres])", installed is not None)
        assert installed is not None
        others["database"] = server = exits.enter_context(postgres.running(installed))
        url = server.database()
    stage = Stage(directory, url, docker=daemon.address)
    exits.callback(stage.close)
    return stage, others


def rounds(names: list[str], seed: int, kills: int) -> list[list[str]]:
    """Who is killed, by round: all in a random order, then all again, and so on."""
    order = random.Random(seed)
    victims = [name for _ in range(-(-kills // len(names))) for name in order.sample(names, len(names))][:kills]
    return [victims[at : at + KILLS_IN_A_ROUND] for at in range(0, kills, KILLS_IN_A_ROUND)]


def recorded(pool: Pool) -> int:
    """How many completions there are; -1 while the database is away."""
    try:
        with pool.read() as connection:
            return connection.scalar(select(func.count()).select_from(completions)) or 0
    except PoolError:
        return -1


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [ONE_EACH, TEN], ids=["one of each", "ten"])
def test_kills_of_proxy_trainer_harness_and_engine_are_survived(
    kills: list[list[str]], exits: ExitStack, tmp_path: Path
) -> None:
    stage = Stage(tmp_path)
    exits.callback(stage.close)
    endure(stage, {}, kills, exits)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("database", ["postgres", "sqlite"])
def test_a_hundred_kills_of_everything_are_survived(
    database: str, docker_daemon: str, exits: ExitStack, tmp_path: Path
) -> None:
    stage, others = set_up(tmp_path, database, exits)
    load = os.getloadavg()[0]
    figures = endure(stage, others, rounds([*PROCESSES, *others], 100, 100), exits)
    if name := os.environ.get("BLACKFORGE_SURVIVAL"):
        file = Path(name)
        written = msgspec.json.decode(file.read_bytes()) if file.exists() else {}
        run = {"date": date.today().isoformat(), "cores": os.cpu_count(), "load_average": round(load, 1)} | figures
        file.write_bytes(msgspec.json.format(msgspec.json.encode(written | {database: run})) + b"\n")


def endure(
    stage: Stage, others: dict[str, OwnDaemon | postgres.Server], killed: list[list[str]], exits: ExitStack
) -> dict[str, object]:
    """Kill these, each round when the run has gone on since the last one; check what is left, and return figures."""
    pool = stage.prepare()
    exits.callback(pool.close)
    stage.until(lambda: step(pool) >= 1, "trainer", seconds=300)
    began, draw = time.monotonic(), random.Random(len(killed))
    for number, names in enumerate(killed):
        kill_all(stage, others, names, draw)
        before = recorded(pool)
        stage.until(lambda before=before: recorded(pool) > before >= 0, "harness", seconds=300)  # type: ignore[misc]
        if number % ROUNDS_OF_A_STEP == ROUNDS_OF_A_STEP - 1:
            at = step(pool)
            stage.until(lambda at=at: step(pool) > at, "trainer", seconds=300)  # type: ignore[misc]
        time.sleep(draw.uniform(0, PAUSE_SECONDS))  # so that kills meet any moment of the loop
        print(f"round {number}: {' '.join(names)}; step {step(pool)}, {time.monotonic() - began:.0f} s", flush=True)
    after = step(pool)
    stage.until(lambda: step(pool) >= after + 2, "trainer", seconds=300)
    stage.end()
    seconds = time.monotonic() - began

    report = verify(pool)
    assert report.damages == [] and report.completions == recorded(pool)
    assert account(pool, find_run(pool, "run").id).unaccounted == 0
    checks.check_tokenizer(pool, stage.directory / "model")
    checks.check_sampled_by_the_run(pool)
    checks.check_acknowledged(pool, stage.directory / "notes")
    checks.check_trained_once(pool)
    checks.check_nothing_left(stage, pool)
    with pool.read() as connection:
        failures = connection.execute(select(attempts.c.failure, func.count()).group_by(attempts.c.failure))
        ended = {failure or "none": count for failure, count in failures}
    return {
        "seconds": round(seconds),
        "kills": dict(sorted(Counter(name for names in killed for name in names).items())),
        "started_again_by_hand": dict(sorted(stage.called_off.items())),
        "steps": step(pool),
        "completions": report.completions,
        "attempts_by_failure": dict(sorted(ended.items())),
    }


def kill_all(
    stage: Stage, others: dict[str, OwnDaemon | postgres.Server], names: list[str], draw: random.Random
) -> None:
    """Kill these one after the other. What holds the run up, database or daemon, may stay away during later kills."""
    away: list[OwnDaemon | postgres.Server] = []
    for name in names:
        time.sleep(draw.choice((0, draw.uniform(0, PAUSE_SECONDS))))
        if name in others:
            if others[name] in away:  # it must be there to be killed once more, and must not be started twice
                start(away)
                away = []
            others[name].kill()
            away.append(others[name])
        else:
            stage.kill(name)
            stage.again(name)
        if draw.random() < 0.5:
            start(away)
            away = []
    start(away)


def start(away: list[OwnDaemon | postgres.Server]) -> None:
    for other in away:
        other.start()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_learn_from_a_running_engine_and_one_may_be_killed(
    split: str, exits: ExitStack, tmp_path: Path
) -> None:
    stage = Stage(tmp_path, steps=STEPS_OF_RANKS)
    exits.callback(stage.close)
    pool = stage.prepare(SPLITS[split])
    stage.until(lambda: step(pool) >= 2, "trainer")
    os.kill(ranks_of(stage.running["trainer"].pid)[1], signal.SIGKILL)
    assert stage.running["trainer"].wait(60) == 128 + signal.SIGKILL
    stage.again("trainer")
    stage.until(lambda: step(pool) >= STEPS_OF_RANKS, "trainer", seconds=600)
    stage.until(lambda: stage.running["harness"].poll() == 0, "harness")
    stage.until(lambda: stage.running["trainer"].poll() == 0, "trainer")
    checks.check_acknowledged(pool, tmp_path / "notes")
    checks.check_trained_once(pool)
    checks.check_versions(pool)
    checks.check_nothing_left(stage, pool)
