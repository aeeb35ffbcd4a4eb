"""Real engine, proxy, trainer, harness, database and Docker daemon are killed with -9, again and again.

Held at the end: every acknowledged answer is in the pool, the pool verifies, every sampled token is accounted for,
every published step trained its own groups once, and nothing is left running.
"""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from sqlalchemy import func, select

from proxy.pool.database import Pool
from proxy.pool.errors import PoolError
from proxy.pool.inspect.account import account
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import completions
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


def victims(names: list[str], seed: int, kills: int) -> list[str]:
    """Who is killed: all in a random order, then all again, so that ten kills hit everybody."""
    order = random.Random(seed)
    rounds = (order.sample(names, len(names)) for _ in range(-(-kills // len(names))))
    return [name for one in rounds for name in one][:kills]


def recorded(pool: Pool) -> int:
    """How many completions there are; -1 while the database is away."""
    try:
        with pool.read() as connection:
            return connection.scalar(select(func.count()).select_from(completions)) or 0
    except PoolError:
        return -1


@pytest.mark.timeout(600)
def test_proxy_trainer_and_harness_may_be_killed_and_the_run_goes_on(exits: ExitStack, tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    exits.callback(stage.close)
    endure(stage, {}, ["trainer", "proxy", "harness"], exits)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("database", "kills"), [("postgres", 10), ("postgres", 100), ("sqlite", 100)])
def test_everything_may_be_killed_and_the_run_goes_on(
    database: str, kills: int, docker_daemon: str, exits: ExitStack, tmp_path: Path
) -> None:
    stage, others = set_up(tmp_path, database, exits)
    endure(stage, others, victims([*PROCESSES, *others], kills, kills), exits)


def endure(stage: Stage, others: dict[str, OwnDaemon | postgres.Server], killed: list[str], exits: ExitStack) -> None:
    """Kill these one after the other, each when the run has gone on since the last kill; then check what is left."""
    pool = stage.prepare()
    exits.callback(pool.close)
    stage.until(lambda: step(pool) >= 1, "trainer", seconds=300)
    pauses = random.Random(len(killed))
    for number, victim in enumerate(killed):
        before = recorded(pool)
        time.sleep(pauses.uniform(0, 1))  # so that a kill meets any moment of the loop
        if victim in others:
            others[victim].kill()
            time.sleep(pauses.uniform(0, 2))
            others[victim].start()
        else:
            stage.kill(victim)
            stage.again(victim)
        print(f"kill {number}: {victim}, step {step(pool)}", flush=True)
        stage.until(lambda before=before: recorded(pool) > before, "harness", seconds=300)  # type: ignore[misc]
    after = step(pool)
    stage.until(lambda: step(pool) >= after + 2, "trainer", seconds=300)
    stage.end()

    report = verify(pool)
    assert report.damages == [] and report.completions == recorded(pool)
    assert account(pool, find_run(pool, "run").id).unaccounted == 0
    checks.check_tokenizer(pool, stage.directory / "model")
    checks.check_acknowledged(pool, stage.directory / "notes")
    checks.check_trained_once(pool)
    checks.check_nothing_left(stage, pool)


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
