"""The warm start: it imitates what was recorded, stops by its measure, and writes a model that can be trained on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import update

from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row
from proxy.pool.errors import UserError
from proxy.pool.inspect.account import account
from proxy.pool.rollouts import runs
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.schema import completions, rollouts
from tests.trainer.make import fill, make_config, make_rows, new_completion, write_model
from tests.trainer.test_loop import prepare
from trainer.commands.recorded_rows import demonstrations
from trainer.commands.sft import batches, check, split, warm_start
from trainer.config import Config, Sft
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy


class Measured(Sft, frozen=True, kw_only=True):
    MEASURE_EVERY = 5


def config_for(pool: Pool, directory: Path, **sft: Any) -> Config:
    fill(pool, runs.open_run(pool, "teacher", "collect", {}).id, 6)
    options = Measured(runs=("teacher",), output=str(directory / "warm"), batch=4, **sft)
    return msgspec.structs.replace(make_config(directory), sft=options)


def test_imitation_lowers_the_loss_until_it_is_enough(pool: Pool, ranks: Ranks, model: Path, tmp_path: Path) -> None:
    config = config_for(pool, tmp_path, max_steps=60, stop_loss=1.0, lr=2e-2)
    train_loss = []
    for steps in (5, 60):
        options = msgspec.structs.replace(config.sft, max_steps=steps)
        train_loss.append(warm_start(msgspec.structs.replace(config, sft=options), ranks)["train_loss"])
        learned = account(pool, 1)
        assert learned.unaccounted == 0 and 0 < learned.imitated.tokens < learned.sampled
    assert train_loss[1] < 0.5 * train_loss[0]
    Policy(Path(config.sft.output), config, ranks)


def test_what_only_reinforcement_asks_for_is_no_part_of_imitation(
    pool: Pool, ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    """A warm start reads the file of its run, but loads no second model for the KL and replays no experts."""
    config = config_for(pool, tmp_path, max_steps=1)
    loss = msgspec.structs.replace(config.loss, kl=0.1, routing="replay")
    expected = warm_start(config, ranks)
    reached = warm_start(msgspec.structs.replace(config, loss=loss), ranks)
    assert reached["train_loss"] == expected["train_loss"]


def lay_out(directory: Path) -> None:
    """Put beside the base model what may stand where a warm start is to write."""
    for name in ("before", "trainer/models/step-000001", "models/mine"):
        write_model(directory / name)
    for name in ("project/.git", "tokenizer", "empty"):
        (directory / name).mkdir(parents=True)
    for name in ("file", "tokenizer/tokenizer.json"):
        (directory / name).touch()
    (directory / "link").symlink_to("model")
    (directory / "moved").symlink_to("before")


OWN = "is the run's model, its output or one of its models, which the warm start would replace; name another directory"
OTHER = r"exists, and is not a model alone, which .* \(config.json, .*\); move it, or name another directory"


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("model", OWN),
        ("trainer", OWN),
        ("trainer/models/step-000001", OWN),
        ("link", OWN),
        ("models", OTHER),
        ("project", OTHER),
        ("file", OTHER),
        ("tokenizer", OTHER),
        (".", OTHER),
        *((name, "") for name in ("empty", "absent", "before", "moved")),
    ],
)
def test_a_warm_start_replaces_another_model_and_nothing_else(
    place: str, sentence: str, model: Path, tmp_path: Path
) -> None:
    lay_out(tmp_path)
    config = make_config(tmp_path, sft=Sft(runs=("teacher",), output=str(tmp_path / place)))
    if not sentence:
        return check(config)
    with pytest.raises(UserError, match=f"^sft.output = {tmp_path / place} {sentence}$"):
        check(config)


def test_a_warm_start_writes_where_a_link_leads(pool: Pool, ranks: Ranks, model: Path, tmp_path: Path) -> None:
    config = config_for(pool, tmp_path, max_steps=1)
    (tmp_path / "warm").symlink_to("large")
    for _ in range(2):
        warm_start(config, ranks)
    assert (tmp_path / "warm").is_symlink() and (tmp_path / "large" / "config.json").is_file()


def test_a_rate_below_the_lowest_one_is_refused_before_anything_is_loaded(ranks: Ranks, tmp_path: Path) -> None:
    options = Sft(runs=("teacher",), output=str(tmp_path / "warm"), lr=1e-5)
    optimizer = {"lr": 1e-2, "min_lr": 1e-4, "decay": "linear"}
    with pytest.raises(UserError, match="sft.lr = 1e-05 is below optimizer.min_lr = 0.0001, to which it would fall"):
        warm_start(make_config(tmp_path, sft=options, optimizer=optimizer), ranks)


def test_only_good_enough_rollouts_are_imitated(pool: Pool, tmp_path: Path) -> None:
    config = config_for(pool, tmp_path)
    everything = demonstrations(config)
    good = demonstrations(msgspec.structs.replace(config, sft=msgspec.structs.replace(config.sft, min_reward=0.5)))
    assert len(everything) == len(good) == 6  # groups
    assert (sum(map(len, everything)), sum(map(len, good))) == (24, 12)
    with pytest.raises(UserError, match="hold 0 groups to imitate"):
        demonstrations(msgspec.structs.replace(config, sft=msgspec.structs.replace(config.sft, min_reward=2.0)))


@pytest.mark.parametrize("held", [False, True])
def test_a_path_over_the_budget_is_refused_before_the_first_step(
    held: bool, pool: Pool, ranks: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path, sft=Sft(runs=("teacher",), output=str(tmp_path / "warm"), batch=4))
    config = msgspec.structs.replace(config, batch=msgspec.structs.replace(config.batch, max_tokens=66))
    groups = [[row] for row in make_rows(7)]
    _, [held_out] = split(groups, config.sft)
    place = next(number for number, [row] in enumerate(groups) if (row is held_out) == held)
    teacher = runs.open_run(pool, "teacher", "collect", {})
    fill(pool, teacher.id, place)
    [member] = open_group(pool, teacher.id, {"id": "t", "domain": "agent"}, 1)
    attempt, _ = open_attempt(pool, member.rollout_id, "command")
    with pool.write() as connection:
        row = to_row(new_completion(attempt.id, [1] * 60, [2] * 8, "v1")) | {"ordinal": 0}
        insert_row(connection, completions, row)
    finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=1.0))
    fill(pool, teacher.id, 6 - place)
    monkeypatch.setattr(Policy, "update", lambda *_: pytest.fail("a step was taken"))
    sentence = r"sft.runs = \['teacher'\] have a path of 67 tokens to imitate; raise batch.max_tokens = 66"
    with pytest.raises(UserError, match=f"^{sentence}$"):
        warm_start(config, ranks)


@pytest.mark.parametrize("min_reward", [None, 1.0])
def test_masked_cheats_are_not_imitated_whatever_their_reward(
    min_reward: float | None, pool: Pool, tmp_path: Path
) -> None:
    config = config_for(pool, tmp_path, min_reward=min_reward)
    before = [len(rows) for rows in demonstrations(config)]
    with pool.write() as connection:  # of each group, one with the reward 1; of the first, both
        cheats = (rollouts.c.member == 1) | ((rollouts.c.member == 3) & (rollouts.c.group_id == 1))
        connection.execute(update(rollouts).where(cheats).values(hacked="mask"))
        connection.execute(update(rollouts).where(rollouts.c.member == 3, ~cheats).values(hacked="tell"))
    masked = [2, 1, 1, 1, 1, 1]
    expected = [was - less for was, less in zip(before, masked, strict=True)]
    assert [len(rows) for rows in demonstrations(config)] == [rows for rows in expected if rows]


def test_held_out_groups_are_never_trained_on() -> None:
    groups = [[row] for row in make_rows(40)]
    train, held_out = split(groups, make_config(Path()).sft)
    assert len(held_out) == 4 and len(train) == 36
    assert not {id(row) for row in train} & {id(row) for row in held_out}


def test_both_sides_get_a_group_whatever_the_share() -> None:
    class Much(Sft, frozen=True, kw_only=True):
        HELD_OUT = 0.99

    for options in (Sft(), Much()):
        train, held_out = split([[row] for row in make_rows(2)], options)
        assert len(train) == len(held_out) == 1


def test_an_epoch_holds_every_row_once() -> None:
    rows = make_rows(10)
    stream = batches(rows, 4, seed=1)
    epoch = [next(stream) for _ in range(3)]
    assert [len(batch) for batch in epoch] == [4, 4, 2]
    assert {id(row) for batch in epoch for row in batch} == {id(row) for row in rows}


def test_the_command_prints_what_was_reached(tmp_path: Path) -> None:
    directory = prepare(tmp_path)
    settings = ["sft.runs=['demo']", "sft.output=warm", "sft.max_steps=2"]
    command = [sys.executable, "-m", "trainer", "sft", str(directory / "trainer.toml")]
    command += [word for setting in settings for word in ("--set", setting)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(output.splitlines()[-1])["step"] == 2
    assert (directory / "warm" / "model.safetensors").exists()
