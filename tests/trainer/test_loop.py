"""The whole loop on a real pool: published steps, kill -9 between its stages, and the same run afterwards."""

import importlib.util
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from proxy.pool.training import steps
from tests.conftest import need
from tests.postgres import Server
from tests.ranks import children, gone, ranks_of
from tests.trainer.lives import PROGRESS, Lives
from tests.trainer.make import fill, write_model
from tests.trainer.test_weights import same_files
from tests.trainer.torchrun import need_gpus
from trainer.commands.main import main
from trainer.commands.output_lock import lock_output
from trainer.config import load_config
from trainer.push.push import PushResult, push
from trainer.push.weights import Weights
from trainer.report import tokens

STEPS = 3
CONFIG = """
pool = "pool.db"
run = "demo"
model = "model"
output = "out"
steps = 3
keep_checkpoints = 10
[batch]
groups = 2
max_staleness = 100
max_tokens = 64
[optimizer]
lr = 1e-2
warmup_steps = 2
[credit]
returns = "turns"
scale = "domain"
[report]
silent_alarms = ["kl_rollout", "extreme_tokens"]  # the rollouts' logprobs are made up
"""


def prepare(directory: Path, groups: int = 2 * STEPS, url: str = "pool.db") -> Path:
    """A pool with a train run whose groups are finished, a model, a configuration."""
    need("megatron-core", importlib.util.find_spec("megatron") is not None)
    write_model(directory / "model")
    (directory / "trainer.toml").write_text(CONFIG.replace("pool.db", url))
    pool = open_pool(load_config(directory / "trainer.toml").pool)
    fill(pool, runs.open_run(pool, "demo", "train", {}).id, groups)
    pool.close()
    return directory


def start(directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "trainer", "launch", str(directory / "trainer.toml"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(directory: Path, *arguments: str) -> str:
    output, _ = (process := start(directory, *arguments)).communicate(timeout=240)
    assert process.returncode == 0, output
    return output


def live(lives: Lives, directory: Path, *arguments: str) -> list[str]:
    """Run a trainer without its launcher to its end, which costs less; return the lines that it printed.

    Advice is left out: on a busy machine a lease may take longer than a step, so that the trainer seems to wait. So are
    lines of progress, which come where something takes long.
    """
    before = len(lives.log.read_text())
    assert lives.live("launch", str(directory / "trainer.toml"), *arguments) == [0], lives.log_end()
    return [line for line in lives.log.read_text()[before:].splitlines() if not line.startswith(("advice ", *PROGRESS))]


def query(directory: Path, sql: str) -> list[tuple[object, ...]]:
    with sqlite3.connect(directory / "pool.db") as connection:
        return connection.execute(sql).fetchall()


def wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 180
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill(process: "subprocess.Popen[str]") -> None:
    """kill -9 of the launcher; its worker must follow."""
    left = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait(lambda: gone(left))


def kill_rank(process: "subprocess.Popen[str]", rank: int) -> str:
    """kill -9 of one rank under torchrun; the others and the launcher must follow. Returns what was printed."""
    ranks = ranks_of(process.pid)
    below = [*children(process.pid), *ranks]
    os.kill(ranks[rank], signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGKILL, output
    wait(lambda: gone(below))
    return output


@contextmanager
def held_up(directory: Path, step: int) -> Iterator[None]:
    """While the block lasts, no trainer gets to the end of publishing this step, whose groups are leased meanwhile.

    A step takes a fifth of a second, in which a busy machine may not ask once whether anything is leased.
    """
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select i from n"
    with sqlite3.connect(directory / "pool.db") as connection:
        connection.execute(f"create view endless as {endless}")
        connection.execute(
            f"create trigger held_up before insert on policy_versions when new.step = {step} "
            "begin select count(*) from endless; end"
        )
    yield
    with sqlite3.connect(directory / "pool.db", timeout=60) as connection:
        connection.execute("drop trigger held_up")
        connection.execute("drop view endless")


@pytest.mark.long  # test_crashes.py kills in the middle of a push
def test_a_run_with_kills_between_its_stages_is_the_undisturbed_run(
    tmp_path: Path, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # `lives` computes on the CPU, and the bits shall be equal
    smooth, rough = prepare(tmp_path / "smooth"), prepare(tmp_path / "rough")
    printed = live(lives, smooth)
    assert [line.split()[1] for line in printed] == ["windowed:", "1", "2", "3"] and "reward 0.500" in printed[1]

    with held_up(rough, 1):  # killed between lease and publication
        process = start(rough)
        wait(lambda: query(rough, "select 1 from groups where state = 'LEASED'") != [])
        kill(process)

    since, process = time.time(), start(rough)
    # killed between a checkpoint and its publication, which the lock holds up
    with sqlite3.connect(rough / "pool.db", timeout=60, isolation_level=None) as lock:
        wait(lambda: unpublished(rough, since, lock))
        wait(lambda: newest(rough, "models") == newest(rough, "checkpoints") == len(versions(rough)))
        kill(process)
        lock.execute("rollback")

    finish(rough)
    every = "select queue_index, state, step from groups order by queue_index"
    assert query(rough, every) == query(smooth, every) == [(i, "CONSUMED", 1 + i // 2) for i in range(2 * STEPS)]
    assert versions(rough) == [(step,) for step in range(STEPS + 1)]
    for step in range(STEPS + 1):
        name = f"out/models/step-{step:06d}"
        assert same_files(smooth / name, rough / name), step
    scales = [query(where, "select version_id, scales from train_steps order by id") for where in (smooth, rough)]
    assert scales[0] == scales[1] and '"steps":3' in str(scales[0][-1])
    losses = [[row["loss"] for row in metrics(where)[1:]] for where in (smooth, rough)]
    assert losses[0] == losses[1]


def unpublished(directory: Path, since: float, lock: sqlite3.Connection) -> bool:
    """Lock the pool if a checkpoint was begun since then that is not published yet, and now cannot be."""
    lock.execute("begin immediate")
    with suppress(FileNotFoundError):  # it gets its name just now
        for path in (directory / "out" / "checkpoints").glob(f"*step-{len(versions(directory)):06d}*"):
            if path.stat().st_mtime > since:
                return True
    lock.execute("rollback")
    return False


def versions(directory: Path) -> list[tuple[object, ...]]:
    return query(directory, "select step from policy_versions order by id")


def newest(directory: Path, kind: str) -> int:
    return max((int(path.name[-6:]) for path in (directory / "out" / kind).glob("step-*")), default=-1)


def metrics(directory: Path) -> list[dict[str, float]]:
    pool = open_pool(load_config(directory / "trainer.toml").pool)
    return steps.metrics(pool, runs.find_run(pool, "demo").id)


@pytest.mark.long  # test_crashes.py kills two ranks at every stage
def test_two_ranks_of_which_one_was_killed_train_the_run_of_one(tmp_path: Path) -> None:
    need_gpus(2)
    one, two = prepare(tmp_path / "one"), prepare(tmp_path / "two")
    finish(one, "--steps", "2")
    with held_up(two, 1):
        process = start(two, "--steps", "2", "--nproc", "2")
        wait(lambda: query(two, "select 1 from groups where state = 'LEASED'") != [])
        assert "ended by signal 9; repeat the same command to resume" in kill_rank(process, 1)
    finish(two, "--steps", "2", "--nproc", "2")
    left, right = metrics(one), metrics(two)
    assert [row["loss"] for row in left[1:]] == pytest.approx([row["loss"] for row in right[1:]], rel=1e-4)
    assert [row["trained_tokens"] for row in right[1:]] == [64, 64]
    for mine, theirs in zip(*(tokens.read(tokens.path(where / "out", 1)) for where in (one, two)), strict=True):
        assert mine.completions == theirs.completions
        assert mine.coefficient == pytest.approx(theirs.coefficient, rel=1e-4)


@pytest.mark.long
def test_training_from_postgresql_is_training_from_sqlite(tmp_path: Path, postgres_server: Server) -> None:
    here, there = prepare(tmp_path / "here"), prepare(tmp_path / "there", url=postgres_server.database())
    finish(here, "--steps", "2")
    finish(there, "--steps", "2")
    assert [row["loss"] for row in metrics(here)[1:]] == [row["loss"] for row in metrics(there)[1:]]
    assert same_files(here / "out/models/step-000002", there / "out/models/step-000002")


def test_old_checkpoints_are_deleted(tmp_path: Path, lives: Lives) -> None:
    directory = prepare(tmp_path)
    live(lives, directory, "--set", "keep_checkpoints=1", "--steps", "2")
    kept = sorted(path.name for path in (directory / "out").glob("*/step-*"))
    assert kept == ["step-000002", "step-000002"]
    config = load_config(directory / "trainer.toml")
    pool: Pool = open_pool(config.pool)
    version = steps.latest(pool, runs.find_run(pool, "demo").id)
    assert version is not None and (version.step, version.pushed_at is not None) == (2, True)
    assert (
        Path(version.hf_dir).name == "step-000002" and push(Weights(version.name, Path()), config.push) == PushResult()
    )


def test_a_batch_that_never_fills_is_told(tmp_path: Path, lives: Lives) -> None:
    directory = prepare(tmp_path, groups=1)
    error = lives.error_of("launch", str(directory / "trainer.toml"), "--set", "batch.patience_seconds=0.1")
    assert error.startswith(
        "error: waited batch.patience_seconds = 0.1 for 2 finished groups for step 1, and 4 of the 4 rollouts in open "
        "groups have ended; check that the harness is running and that its concurrency is large enough, or raise "
    )


@pytest.mark.long
def test_a_killed_step_keeps_what_a_users_function_said_about_its_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, function = prepare(tmp_path, groups=2), tmp_path / "filters.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    chosen = ("--steps", "1", "--set", "batch.function=filters:judge")
    output, _ = (process := start(directory, *chosen)).communicate(timeout=240)
    assert process.returncode == 2 and "error: batch.function = filters:judge cannot be used (Module" in output
    function.write_text("def judge(rollout): return [1, 2, 0, 1 if rollout['group'] else 'x'][rollout['member']]")
    process = start(directory, *chosen)
    wait(lambda: query(directory, "select 1 from groups where function is not null") != [])
    kill(process)
    function.write_text("def judge(rollout): return 3")
    finish(directory, *chosen)
    assert [weight for (weight,) in query(directory, "select weight from rollouts order by id")] == [
        *(1, 2, 0, None),  # half of the first group is set aside, so it is dropped
        *(1, 2, 0, 1),
    ]
    [_, step] = metrics(directory)
    aside = {"function: filters:judge": 16, "function: filters:judge returned a str, not a number": 8}
    assert step["excluded_tokens"] == aside | {"too_few_valid": 16} and step["trained_tokens"] == 24


@pytest.mark.long
def test_two_ranks_of_which_the_first_was_killed_go_on_and_what_is_wrong_is_told_once(tmp_path: Path) -> None:
    need_gpus(2)
    directory = prepare(tmp_path, groups=3)
    with held_up(directory, 1):
        process = start(directory, "--nproc", "2")
        wait(lambda: query(directory, "select 1 from groups where state = 'LEASED'") != [])
        kill_rank(process, 0)
    process = start(directory, "--nproc", "2", "--set", "batch.patience_seconds=1")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    error = output.splitlines()[-1]
    assert error.startswith("error: waited batch.patience_seconds = 1 for 2 finished groups")
    assert error.endswith(" (see docs/training.md)")
    assert output.count("waited") == 1 and "Traceback" not in output
    assert query(directory, "select state, count(*) from groups group by state") == [("CONSUMED", 2), ("DONE", 1)]


def test_a_stopped_trainer_says_so_and_a_second_one_is_refused(tmp_path: Path, lives: Lives) -> None:
    directory = prepare(tmp_path, groups=0)
    waiting = start(directory)
    wait(lambda: (directory / "pool.db").exists() and query(directory, "select 1 from policy_versions") != [])
    with pytest.raises(UserError, match="another trainer is using .*out; stop it or set another output"):
        lock_output(directory / "out", seconds=0)
    error = lives.error_of("launch", str(directory / "trainer.toml"), "--set", "output=other")
    assert "run 'demo' of the pool" in error and "is in use by process" in error and "a trainer; wait for it" in error
    assert main(["rollback", str(directory / "trainer.toml"), "--set", "output=other", "--to", "0"]) == 2
    waiting.terminate()
    output, _ = waiting.communicate(timeout=180)
    assert waiting.returncode == 128 + signal.SIGTERM and "ended by signal 15; repeat the same command" in output
    lock_output(directory / "out")


def test_a_pool_that_refuses_writes_is_told(tmp_path: Path, lives: Lives) -> None:
    directory = prepare(tmp_path)
    with sqlite3.connect(directory / "pool.db") as connection:
        connection.execute("drop table train_steps")
    error = lives.error_of("launch", str(directory / "trainer.toml"))
    assert error.startswith("error: the pool") and "refused a write (no such table: train_steps)" in error


def test_a_rollback_is_trained_again_to_the_same_weights(
    tmp_path: Path, lives: Lives, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = prepare(tmp_path)
    live(lives, directory)
    first = shutil.copytree(directory / "out" / "models" / "step-000003", tmp_path / "first")
    assert main(["rollback", str(directory / "trainer.toml"), "--to", "1"]) == 0
    assert "at step 1 (" in (output := capsys.readouterr().out) and "4 groups will be trained again" in output
    assert query(directory, "select state, count(*) from groups group by state") == [("CONSUMED", 2), ("LEASED", 4)]
    assert main(["rollback", str(directory / "trainer.toml"), "--to", "1"]) == 0  # repeating it changes nothing
    assert [line.split()[1] for line in live(lives, directory)] == ["windowed:", "2", "3"]
    assert same_files(first, directory / "out" / "models" / "step-000003")
    names = query(directory, "select step, retired_at is null from policy_versions order by id")
    assert names == [(0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]


def test_a_rollback_to_what_is_gone_is_one_sentence(
    tmp_path: Path, lives: Lives, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = prepare(tmp_path)
    live(lives, directory, "--steps", "1")
    shutil.rmtree(directory / "out" / "checkpoints" / "step-000000")
    for step in ("0", "7"):
        assert main(["rollback", str(directory / "trainer.toml"), "--to", step]) == 2
        assert f"no checkpoint of step {step}; the steps that have one are: 1 " in capsys.readouterr().err
    assert query(directory, "select count(*) from policy_versions where retired_at is not null") == [(0,)]
