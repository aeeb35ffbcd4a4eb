"""Several updates per batch: what each learns from, that they act, and that a step is taken whole or not at all."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file
from sqlalchemy import update

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from proxy.pool.schema import rollouts
from proxy.pool.training import steps
from tests.trainer.lives import End, Lives
from tests.trainer.make import fill, make_config, write_model
from tests.trainer.test_batch import group
from tests.trainer.test_loop import metrics, prepare, query
from tests.trainer.test_not_finite import HUGE, STATES, spoil
from tests.trainer.test_weights import same_files
from trainer.commands.rollback import roll_back
from trainer.config import Loss
from trainer.config.step import StepOptions
from trainer.data.assemble import TrainingBatch, assemble, trained_tokens
from trainer.data.micro_batch import MicroBatch
from trainer.data.minibatches import by_minibatch, orders
from trainer.loop import train
from trainer.megatron.model.model import PolicyModel
from trainer.megatron.parallel import Ranks
from trainer.megatron.schedule import forward
from trainer.policy import Policy

KILLED = -9
FOUR = ("loss.minibatches=2", "loss.epochs=2")
CALM = {"silent_alarms": ["kl_rollout", "extreme_tokens"]}


def test_groups_are_divided_whole_by_cost_and_no_minibatch_is_without_something_to_train() -> None:
    assert by_minibatch([5, 1, 4, 2, 3], [True] * 5, 2) == [[0, 1, 3], [2, 4]]
    assert by_minibatch([9, 1, 1], [False, True, True], 3) == [[0, 1], [2]]  # no more than groups that teach
    assert by_minibatch([3, 3], [False, False], 4) == [[0, 1]] and by_minibatch([], [], 4) == [[]]
    assert orders(3, 2, step=5) == orders(3, 2, step=5) and {*map(len, orders(3, 2, step=5))} == {3}
    assert len({str(orders(4, 2, step)) for step in range(9)}) > 1


def batch(**loss: Any) -> TrainingBatch:
    """Two groups that teach, of three and of two rollouts, and one of equal rewards."""
    return assemble([group([1.0, 0.0, 0.5]), group([1.0, 1.0]), group([2.0, 0.0])], StepOptions(loss=Loss(**loss)))


@pytest.mark.parametrize("norm", ["token", "rollout"])
def test_each_update_divides_by_its_own_counts_and_advantages_are_those_of_the_whole_batch(norm: str) -> None:
    whole, divided = batch(norm=norm), batch(norm=norm, minibatches=3)
    assert [len(rows) for rows in whole.minibatches] == [5] and [len(rows) for rows in divided.minibatches] == [3, 2]
    assert [trained_tokens(rows) for rows in divided.minibatches] == [15, 10] and divided.tokens == whole.tokens
    for one, other in zip(whole.rows, divided.rows, strict=True):
        assert (one.advantage == other.advantage).all() and one.completions == other.completions
    for rows in divided.minibatches:
        assert sum(row.weight * row.trained.sum() for row in rows) == pytest.approx(trained_tokens(rows))
    assert divided.fates == whole.fates


def trained(directory: Path, ranks: Ranks, groups: int = 2, **loss: Any) -> Path:
    """The model after one step of these groups."""
    write_model(directory / "model")
    config = make_config(directory, steps=1, report=CALM, loss=loss)
    config = msgspec.structs.replace(config, batch=msgspec.structs.replace(config.batch, groups=groups))
    pool = open_pool(config.pool)
    fill(pool, runs.open_run(pool, config.run, "train", None).id, groups)
    train(config, ranks)
    return directory / "trainer/models/step-000001"


def test_bounds_of_policy_over_old_act_from_the_second_update_on(ranks: Ranks, tmp_path: Path) -> None:
    """With one update they are refused (test_config.py)."""
    wide, narrow = (
        trained(tmp_path / str(cap), ranks, kind="decoupled_ppo", minibatches=2, epochs=2, cap=cap, floor=floor)
        for cap, floor in ((100.0, 0.0), (1.2, 0.8))
    )
    assert not same_files(wide, narrow)
    pool = open_pool(str(tmp_path / "1.2/pool.db"))
    [_, step] = steps.metrics(pool, runs.find_run(pool, "demo").id)
    assert (step["updates"], step["trained_tokens"], step["sampled_tokens"]) == (4, 64, 64)
    assert step["ratio_mean"] != 1 and step["last_ratio_max"] > step["last_ratio_mean"]
    assert step["last_clip_fraction"] > 0 and step["unaccounted_tokens"] == 0


def test_old_logprobs_are_computed_only_for_losses_that_compare_with_them(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []

    def counted(model: PolicyModel, micros: Sequence[MicroBatch]) -> list[Any]:
        passes.append(len(micros))
        return forward(model, micros)

    monkeypatch.setattr("trainer.policy.forward", counted)
    counts = {}
    for kind in ("cispo", "ipa"):
        trained(tmp_path / kind, ranks, kind=kind, minibatches=2, epochs=2)
        counts[kind] = len(passes)
    assert counts == {"cispo": 0, "ipa": 2}


def test_one_group_has_one_update_whatever_minibatches_are_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    one, asked = (trained(tmp_path / str(count), ranks, groups=1, minibatches=count) for count in (1, 4))
    assert same_files(one, asked)


def launch(directory: Path, ranks: int, *settings: str, until: int = 2) -> list[str]:
    chosen = [word for setting in settings for word in ("--set", setting)]
    return ["launch", str(directory / "trainer.toml"), "--steps", str(until), "--nproc", str(ranks), *chosen]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_between_two_updates_of_a_step_changes_nothing(ranks: int, lives: Lives, tmp_path: Path) -> None:
    smooth, rough = prepare(tmp_path / "smooth", groups=4), prepare(tmp_path / "rough", groups=4)
    assert lives.live(*launch(smooth, ranks, *FOUR), ranks=ranks) == [0] * ranks, lives.log_end()
    for count in (2, 6):  # of four in each step: within the first step, and within the second
        end = End("return", "Policy._step", count, ranks - 1)
        statuses = lives.live(*launch(rough, ranks, *FOUR), ranks=ranks, end=end)
        assert statuses[ranks - 1] == KILLED, (statuses, lives.log_end())
    assert lives.live(*launch(rough, ranks, *FOUR), ranks=ranks) == [0] * ranks, lives.log_end()
    for step in (1, 2):
        assert same_files(smooth / f"out/models/step-{step:06d}", rough / f"out/models/step-{step:06d}")
    left, right = ([(row["loss"], row["last_ratio_max"]) for row in metrics(where)[1:]] for where in (smooth, rough))
    assert left == right
    assert query(rough, "select count(*) from policy_versions") == [(3,)]


@pytest.mark.long
def test_two_ranks_take_the_updates_of_one(lives: Lives, tmp_path: Path) -> None:
    one, two = prepare(tmp_path / "one", groups=4), prepare(tmp_path / "two", groups=4)
    for ranks, directory in enumerate((one, two), 1):
        assert lives.live(*launch(directory, ranks, *FOUR), ranks=ranks) == [0] * ranks, lives.log_end()
    names = ("loss", "grad_norm", "updates", "trained_tokens", "last_ratio_mean", "clip_fraction", "kl_rollout")
    for left, right in zip(metrics(one)[1:], metrics(two)[1:], strict=True):
        assert [left[name] for name in names] == pytest.approx([right[name] for name in names], rel=1e-3)
    first, second = (load_file(where / "out/models/step-000001/model.safetensors") for where in (one, two))
    assert all((first[name] - second[name]).abs().max() < 2e-4 for name in second)


@pytest.mark.long
def test_a_gradient_that_is_not_finite_in_a_later_minibatch_takes_the_whole_step_back(
    lives: Lives, tmp_path: Path
) -> None:
    rough, smooth = prepare(tmp_path / "rough", groups=2), prepare(tmp_path / "smooth", groups=2)
    spoil(rough, 0)
    pool = open_pool(str(rough / "pool.db"))
    with pool.write() as connection:
        connection.execute(update(rollouts).where(rollouts.c.group_id == 2, rollouts.c.reward == 1).values(reward=HUGE))
    pool.close()
    settings = ("loss.minibatches=2",)
    assert orders(2, 1, step=1) == [[0, 1]]  # the first update is taken before the gradient of the second is known
    for directory in (rough, smooth):
        assert lives.live(*launch(directory, 1, *settings, until=1)) == [0], lives.log_end()
    dropped = ("TOMBSTONE", None, "gradient_not_finite", "step 1")
    assert query(rough, STATES) == [dropped] * 2 + [("CONSUMED", 1, None, None)] * 2
    assert same_files(rough / "out/models/step-000001", smooth / "out/models/step-000001")


@pytest.mark.long
def test_kl_is_against_the_policy_of_some_steps_ago_or_a_named_model(ranks: Ranks, tmp_path: Path) -> None:
    """At step 3, the policy of one step before its own start is that of step 1; until then it is the initial one."""
    models = {}
    for name, loss in (("ago", {"kl": 0.5, "kl_steps_ago": 1}), ("initial", {"kl": 0.5})):
        write_model(tmp_path / name / "model")
        config = make_config(tmp_path / name, steps=3, keep_checkpoints=9, report=CALM, loss=loss)
        pool = open_pool(config.pool)
        fill(pool, runs.open_run(pool, config.run, "train", None).id, 6)
        train(config, ranks)
        models[name] = tmp_path / name / "trainer/models"
    for step in (1, 2, 3):
        same = same_files(models["ago"] / f"step-{step:06d}", models["initial"] / f"step-{step:06d}")
        assert same == (step < 3)
    roll_back(config, 2)
    named = shutil.copytree(models["initial"] / "step-000001", tmp_path / "named")
    train(msgspec.structs.replace(config, loss=Loss(kl=0.5, kl_model=str(named))), ranks)
    assert same_files(models["ago"] / "step-000003", models["initial"] / "step-000003")
    write_model(tmp_path / "other", "qwen2")
    foreign = make_config(tmp_path, loss={"kl": 1, "kl_model": str(tmp_path / "other")})
    with pytest.raises(UserError, match="loss.kl_model = .*other has another shape or tokenizer"):
        Policy(tmp_path / "ago/model", foreign, ranks)


@pytest.mark.long
def test_a_step_masks_the_rollouts_whose_agents_used_up_their_budget(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    config = make_config(tmp_path, steps=1, report=CALM, credit={"mask": ["budget"]})
    pool = open_pool(config.pool)
    fill(pool, runs.open_run(pool, config.run, "train", None).id, 2)
    with pool.write() as connection:
        connection.execute(update(rollouts).where(rollouts.c.id <= 2).values(failure="agent_budget"))
    train(config, ranks)
    [_, step] = steps.metrics(pool, runs.find_run(pool, "demo").id)
    assert step["masked_tokens"] == {"budget": 16} and step["trained_tokens"] == 64 and step["valid_rollouts"] == 8
