"""The loop's reports on a real pool: the same figures in pool and board, once a step, also after a rollback."""

import errno
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.schema import events
from proxy.pool.training import steps
from tests.conftest import need
from tests.trainer.make import fill, make_config, write_model
from trainer.commands.rollback import roll_back
from trainer.config import Config
from trainer.config.monitor import MonitorConfig
from trainer.loop import train
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy
from trainer.report import tokens
from trainer.report.reporter import Reporter
from trainer.run_state import RunState

CALM = {"silent_alarms": ["kl_rollout", "extreme_tokens"]}
"""The rollouts' logprobs are made up."""


def prepare(directory: Path, steps_: int, **changes: Any) -> tuple[Config, Pool]:
    write_model(directory / "model")
    config = make_config(directory, **{"steps": steps_, "report": CALM} | changes)
    pool = open_pool(config.pool)
    fill(pool, runs.open_run(pool, config.run, "train", None).id, 2 * steps_)
    return config, pool


def shown(config: Config, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(Path(config.output) / "tensorboard"), size_guidance={"scalars": 0})
    return [(event.step, event.value) for event in events.Reload().Scalars(tag)]


def noted(pool: Pool, kind: str) -> list[str]:
    with pool.read() as connection:
        return list(connection.scalars(select(events.c.detail).where(events.c.kind == kind)))


def published(pool: Pool, config: Config, name: str) -> list[tuple[int, Any]]:
    metrics = steps.metrics(pool, runs.find_run(pool, config.run).id)[1:]
    return [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in metrics]


def test_board_and_pool_agree_and_a_step_that_is_trained_again_stands_there_once(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "KEPT_STEPS", 2)
    config, pool = prepare(tmp_path, 3, report=CALM | {"negative_gradient_every": 2}, keep_checkpoints=9)
    train(config, ranks)
    assert shown(config, "loss/loss") == published(pool, config, "loss")
    kept = sorted(path.name for path in (tmp_path / "trainer" / "tokens").iterdir())
    assert kept == ["000002.npz", "000003.npz"]
    roll_back(config, 1)
    train(msgspec.structs.replace(config, optimizer=msgspec.structs.replace(config.optimizer, lr=1e-3)), ranks)
    assert shown(config, "loss/lr") == published(pool, config, "lr") == [(1, 1e-2), (2, 1e-3), (3, 1e-3)]
    rows = steps.metrics(pool, runs.find_run(pool, config.run).id)[1:]
    assert all(row["pause_seconds"] == row["engine_wait_seconds"] == 0 < row["seconds"]["push"] for row in rows)
    assert ["negative_gradient_share" in row for row in rows] == [False, True, False]
    assert all(row["sampled_tokens"] == 64 == row["trained_tokens"] and not row["unaccounted_tokens"] for row in rows)


def test_alarms_are_printed_noted_and_part_of_the_metrics(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, pool = prepare(tmp_path, 1, report={"silent_alarms": ["extreme_tokens"]})
    train(config, ranks)
    [row] = steps.metrics(pool, runs.find_run(pool, config.run).id)[1:]
    [event] = noted(pool, "alarm")
    assert row["alarms"] == ["kl_rollout"] and event.startswith("alarm in step 1: kl_rollout = ")
    assert "alarm in step 1: kl_rollout = " in capsys.readouterr().err
    assert shown(config, "alarms/raised") == [(1, 1.0)]


def test_an_alarm_of_a_step_whose_push_fails_is_noted_once_by_the_next_start(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, pool = prepare(tmp_path, 1, report={"silent_alarms": ["extreme_tokens"]})

    def refused(run: RunState, version: steps.Version) -> None:
        if version.step == 1:
            raise UserError("the engine refuses")

    with monkeypatch.context() as patch, pytest.raises(UserError, match="the engine refuses"):
        patch.setattr(RunState, "push", refused)
        train(config, ranks)
    assert noted(pool, "alarm") == []
    for _ in range(2):
        train(config, ranks)
    [event] = noted(pool, "alarm")
    assert event.startswith("alarm in step 1: kl_rollout = ") and capsys.readouterr().err.count(event) == 1


def test_a_start_with_another_bound_tells_no_old_alarm_again(ranks: Ranks, tmp_path: Path) -> None:
    """A person raises it to end a pause, say: of the new bound the alarm would not be true."""
    bound = {"name": "long", "figure": "trained_tokens", "above": 0, "steps": 1}
    config, pool = prepare(tmp_path, 1, monitor={"rule": [bound]})
    train(config, ranks)
    [told] = noted(pool, "alarm")
    assert told.startswith("alarm in step 1: long = ")
    raised = msgspec.convert({"rule": [bound | {"above": 1e9}]}, MonitorConfig)
    train(msgspec.structs.replace(config, monitor=raised), ranks)
    assert noted(pool, "alarm") == [told]


def test_an_alarm_of_a_step_that_is_trained_again_is_noted_again(ranks: Ranks, tmp_path: Path) -> None:
    config, pool = prepare(tmp_path, 1, report={"silent_alarms": ["extreme_tokens"]}, keep_checkpoints=9)
    train(config, ranks)
    roll_back(config, 0)
    train(config, ranks)
    first, second = noted(pool, "alarm")
    assert first == second  # the same batch


def test_a_group_that_is_dropped_while_its_step_is_published_is_counted(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, pool = prepare(tmp_path, 2, keep_checkpoints=9)
    publish, dropped = steps.publish, Outcome(attempt_id=None, reward=None, failure="hung")

    def dropping(pool: Pool, run_id: int, done: steps.Published, trainer: str | None) -> steps.Version:
        if done.step == 1:  # its metrics are made already
            [member] = open_group(pool, run_id, {"id": "late", "instruction": "i", "domain": "agent"}, 1)
            finish_rollout(pool, member.rollout_id, dropped)
        return publish(pool, run_id, done, trainer)

    monkeypatch.setattr(steps, "publish", dropping)
    train(config, ranks)
    rows = steps.metrics(pool, runs.find_run(pool, config.run).id)[1:]
    assert [row["unused_groups"] for row in rows] == [{"group_filtered": 1}, {}]


class Full:
    """A board on a full disk."""

    name = "full"

    def __init__(self) -> None:
        self.asked = 0

    def write(self, step: int, at: float, metrics: Mapping[str, Any]) -> None:
        self.asked += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_training_goes_on_without_a_board_that_cannot_write(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, pool = prepare(tmp_path, 2)
    policy = Policy(Path(config.model), config, ranks)
    metrics = {"seconds": {}, "reward_mean": 0, "groups": 1, "dropped_groups": 0, "trained_tokens": 0, "loss": 2.0}
    metrics |= {"grad_norm": 0, "excluded_tokens": {}, "staleness_mean": 0}
    with RunState(config, ranks) as run, Reporter(config, run, policy) as reporter:
        version = run.publish(0, (tmp_path, tmp_path), {"loss": 1.0})
        reporter.exporters.append(full := Full())
        reporter.announce(version, metrics)
        reporter.announce(version, metrics)
    assert full.asked == 1
    [event] = noted(pool, "report")
    assert event.startswith("full could not be written ([Errno 28] No space left on device); training continues")
    assert capsys.readouterr().err.count("warning: full could not be written") == 1
    assert steps.metrics(pool, run.pool_run.id)[0]["loss"] == 2.0


OFFLINE = """
from pathlib import Path
from trainer.config.report import Report
from trainer.report.exporters import WeightsAndBiases
board = WeightsAndBiases(Path({directory!r}), Report(wandb="blackforge"), "demo", "-after-7")
board.write(1, 1000.0, {{"loss": 0.5, "staleness_tokens": {{"0": 3}}}})
board.close()
"""


def test_weights_and_biases_gets_the_same_without_a_network(tmp_path: Path) -> None:
    import importlib.util

    need("wandb (pip install blackforge[wandb])", importlib.util.find_spec("wandb") is not None)
    code = OFFLINE.format(directory=str(tmp_path))
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        timeout=120,
        env=os.environ | {"WANDB_MODE": "offline"},
    )
    [written] = (tmp_path / "wandb").glob("offline-run-*-demo-after-7/run-demo-after-7.wandb")
    data = written.read_bytes()
    assert b"loss/loss" in data and b"staleness/staleness_tokens" in data
