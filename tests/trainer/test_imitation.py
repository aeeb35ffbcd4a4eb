"""Steps that imitate recorded rollouts beside reinforcement: what they weigh, where they are counted, and that a step
stays one step, killed or divided."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file
from sqlalchemy import update

from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.account import account
from proxy.pool.rollouts import runs
from proxy.pool.schema import rollouts
from proxy.pool.training import steps
from tests.trainer.lives import End, Lives
from tests.trainer.make import fill, make_config, make_rows, write_model
from tests.trainer.test_loop import metrics, prepare
from tests.trainer.test_updates import CALM, KILLED, launch
from tests.trainer.test_weights import same_files
from trainer.config import Config
from trainer.config.imitation import Imitation
from trainer.config.model_shape import ExpertShape
from trainer.data.imitation import chosen, denominator, mixed
from trainer.data.routed_experts import UNKNOWN
from trainer.loop import train
from trainer.megatron.parallel import Ranks
from trainer.run_state import RunState

HALF = Imitation(run="teacher", weight=0.5, rows=3)


def test_each_source_is_a_mean_of_its_own_whatever_is_reinforced_beside_it() -> None:
    own, teacher, other = make_rows(5), make_rows(4, seed=1), make_rows(1, seed=2)
    minibatches = mixed([own[:3], own[3:], []], [teacher, other], [0.5, 2.0], None)
    shares = [[row for row in rows if row.imitated] for rows in minibatches]
    assert [len(rows) for rows in shares] == [3, 1, 1] and denominator(minibatches[2]) == 1
    kept = [row for rows in minibatches for row in rows if not row.imitated]
    assert [*map(id, kept)] == [*map(id, own)]
    for rows, whole, weights in zip(shares, minibatches, ([0.5, 2.0], [0.5], [0.5]), strict=True):
        sums: dict[bool, float] = {}
        for row in rows:
            from_other = row.tokens is other[0].tokens
            sums[from_other] = sums.get(from_other, 0.0) + row.weight * row.trained.sum() / denominator(whole)
        assert sorted(sums.values()) == pytest.approx(weights)
    mixture = ExpertShape(count=8, per_token=2, ffn=4, layers=(True, True), normalised=True)
    [rows] = mixed([[]], [other], [1.0], mixture)
    assert rows[0].experts is not None and rows[0].experts.shape == (len(rows[0].tokens), 2, 2)
    assert np.unique(rows[0].experts).tolist() == [UNKNOWN]


def test_rows_are_drawn_by_the_number_of_the_step() -> None:
    rows = make_rows(9)
    place = {id(row): index for index, row in enumerate(rows)}
    draws = [[place[id(row)] for row in chosen(rows, HALF, step)] for step in (1, 1, 2, 3)]
    assert draws[0] == draws[1] and len({tuple(draw) for draw in draws}) == 3 and {*map(len, draws)} == {3}
    assert all(len(set(draw)) == 3 for draw in draws) and len(chosen(rows[:2], HALF, 1)) == 2


def mixing(directory: Path, **changes: Any) -> Config:
    """A run of two groups, and a teacher of six in the same pool."""
    write_model(directory / "model")
    config = make_config(directory, steps=1, report=CALM, **changes)
    pool = open_pool(config.pool)
    fill(pool, runs.open_run(pool, config.run, "train", None).id, 2)
    fill(pool, runs.open_run(pool, "teacher", "collect", {}).id, 6)
    return config


def first_step(config: Config, ranks: Ranks) -> dict[str, Any]:
    train(config, ranks)
    pool = open_pool(config.pool)
    return steps.metrics(pool, runs.find_run(pool, config.run).id)[-1]


def test_a_step_imitates_beside_its_loss_and_the_source_is_told(ranks: Ranks, tmp_path: Path) -> None:
    """The teacher's first groups are those of the run, so imitated and reinforced tokens share places in the trees."""
    plain = first_step(mixing(tmp_path / "plain"), ranks)
    config = mixing(tmp_path / "mixed", imitation=[msgspec.structs.asdict(HALF)])
    step = first_step(config, ranks)
    assert step["imitated_tokens"] == 3 * 8 and "imitated_tokens" not in plain
    assert step["loss"] == pytest.approx(plain["loss"] + 0.5 * step["imitation_loss"], rel=1e-5)
    names = ("trained_tokens", "sampled_tokens", "unaccounted_tokens", "ratio_mean", "kl_rollout", "advantage_std")
    assert {name: step[name] for name in names} == {name: pytest.approx(plain[name]) for name in names}
    assert not same_files(*(tmp_path / name / "trainer/models/step-000001" for name in ("plain", "mixed")))
    pool = open_pool(config.pool)
    learner, teacher = (account(pool, runs.find_run(pool, name).id) for name in ("demo", "teacher"))
    assert (learner.imitated.tokens, teacher.imitated.tokens, teacher.unaccounted) == (0, 24, 0)
    assert (teacher.imitated.rollouts, learner.trained.tokens) == (3, 64)


def test_a_step_without_anything_to_reinforce_still_imitates(ranks: Ranks, tmp_path: Path) -> None:
    config = mixing(tmp_path, imitation=[msgspec.structs.asdict(HALF)])
    pool = open_pool(config.pool)
    with pool.write() as connection:
        connection.execute(update(rollouts).where(rollouts.c.group_id <= 2).values(reward=1.0))
    step = first_step(config, ranks)
    assert step["trained_tokens"] == 0 and step["imitated_tokens"] == 24 and step["grad_norm"] > 0
    assert step["loss"] == pytest.approx(0.5 * step["imitation_loss"], rel=1e-5)


def test_a_source_with_nothing_to_imitate_is_refused_at_the_start(pool: Pool, ranks: Ranks, tmp_path: Path) -> None:
    fill(pool, runs.open_run(pool, "teacher", "collect", {}).id, 1)
    with pytest.raises(UserError, match="imitation.run = demo is the run that is trained"):
        make_config(tmp_path, imitation=[{"run": "demo", "weight": 1.0}])
    sentences: dict[str, dict[str, Any]] = {
        "the run teacher, which .* names, has no rollout to imitate; record some": {"min_reward": 2.0},
        "teacher, .*, has a path of 27 tokens to imitate; raise batch.max_tokens = 26": {},
        "run 'nobody' is not in the pool": {"run": "nobody"},
    }
    for sentence, fields in sentences.items():
        config = make_config(tmp_path, imitation=[{"run": "teacher", "weight": 1.0, **fields}])
        config = replace_tokens(config, 26)
        with pytest.raises(UserError, match=sentence):
            RunState(config, ranks)


def replace_tokens(config: Config, tokens: int) -> Config:
    return msgspec.structs.replace(config, batch=msgspec.structs.replace(config.batch, max_tokens=tokens))


SETTINGS = ('imitation=[{run="teacher", weight=0.5, rows=3}]', "loss.minibatches=2", "loss.epochs=2")


def prepared(directory: Path) -> Path:
    prepare(directory, groups=4)
    pool = open_pool(str(directory / "pool.db"))
    fill(pool, runs.open_run(pool, "teacher", "collect", {}).id, 6)
    pool.close()
    return directory


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_within_a_step_that_imitates_changes_nothing(ranks: int, lives: Lives, tmp_path: Path) -> None:
    smooth, rough = prepared(tmp_path / "smooth"), prepared(tmp_path / "rough")
    assert lives.live(*launch(smooth, ranks, *SETTINGS), ranks=ranks) == [0] * ranks, lives.log_end()
    for end in (End("return", "Policy._step", 2, ranks - 1), End("return", "StepReport.metrics", 2, 0)):
        assert KILLED in lives.live(*launch(rough, ranks, *SETTINGS), ranks=ranks, end=end), lives.log_end()
    assert lives.live(*launch(rough, ranks, *SETTINGS), ranks=ranks) == [0] * ranks, lives.log_end()
    for step in (1, 2):
        assert same_files(smooth / f"out/models/step-{step:06d}", rough / f"out/models/step-{step:06d}")
    for directory in (smooth, rough):
        pool = open_pool(str(directory / "pool.db"))
        assert account(pool, runs.find_run(pool, "teacher").id).imitated.tokens in (24, 32, 40, 48)
    left, right = ([row["imitation_loss"] for row in metrics(where)[1:]] for where in (smooth, rough))
    assert left == right


@pytest.mark.long
def test_two_ranks_imitate_as_one(lives: Lives, tmp_path: Path) -> None:
    one, two = prepared(tmp_path / "one"), prepared(tmp_path / "two")
    for ranks, directory in enumerate((one, two), 1):
        assert lives.live(*launch(directory, ranks, *SETTINGS), ranks=ranks) == [0] * ranks, lives.log_end()
    names = ("loss", "grad_norm", "imitation_loss", "imitated_tokens", "kl_rollout")
    for left, right in zip(metrics(one)[1:], metrics(two)[1:], strict=True):
        assert [left[name] for name in names] == pytest.approx([right[name] for name in names], rel=1e-3)
    first, second = (load_file(where / "out/models/step-000001/model.safetensors") for where in (one, two))
    assert all((first[name] - second[name]).abs().max() < 2e-4 for name in second)
