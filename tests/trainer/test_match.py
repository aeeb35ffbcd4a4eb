"""A run on files of another run or model is refused in one sentence with a way out. Nothing is overwritten."""

import json
import os
import shutil
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update

from proxy.pool.completions.records import NewCompletion
from proxy.pool.completions.store import to_row
from proxy.pool.database import insert_row, open_pool
from proxy.pool.processes.deliveries import register_proxy
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import completions
from tests.trainer.lives import Lives
from tests.trainer.make import VOCABULARY, new_completion, write_model
from tests.trainer.test_loop import metrics, prepare, query
from trainer.commands.main import main
from trainer.config.model_shape import FAMILIES

SFT = ("--set", "sft.runs=['demo']", "--set", "sft.output=warm")


def launch(directory: Path, steps: int, *settings: str) -> list[str]:
    chosen = [word for setting in settings for word in ("--set", setting)]
    return ["launch", str(directory / "trainer.toml"), "--steps", str(steps), *chosen]


def record(directory: Path, *items: NewCompletion) -> None:
    """One more group, finished, of a rollout for each completion; every second one is rewarded."""
    pool = open_pool(str(directory / "pool.db"))
    members = open_group(pool, find_run(pool, "demo").id, {"id": "t", "domain": "agent"}, len(items))
    for member, item in zip(members, items, strict=True):
        attempt, _ = open_attempt(pool, member.rollout_id, "command")
        with pool.write() as connection:
            insert_row(connection, completions, to_row(replace(item, attempt_id=attempt.id)) | {"ordinal": 0})
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=float(member.member % 2)))
    pool.close()


def test_heads_that_do_not_divide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(tmp_path, groups=0)
    assert main([*launch(directory, 1, "parallel.tensor=4"), "--nproc", "4"]) == 2
    assert capsys.readouterr().err == (
        "error: parallel.tensor = 4 does not divide the model's 2 key-value heads; choose a divisor"
        " (see docs/models.md)\n"
    )
    assert main([*launch(directory, 1, "parallel.pipeline=4"), "--nproc", "4"]) == 2
    assert "parallel.pipeline = 4 does not divide the model's 2 layers" in capsys.readouterr().err


def test_a_family_that_is_not_mapped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = prepare(tmp_path, groups=0)
    config = directory / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gpt2"}))
    assert main(launch(directory, 1)) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: ")
        and f"model_type gpt2; the trainer maps {', '.join(FAMILIES)}: use one of these" in error
    )
    assert error.count("\n") == 1


def test_a_mixture_that_sglang_would_serve_wrongly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has experts in every layer, whatever the model's config says, and is silent about weights it does not find."""
    directory = prepare(tmp_path, groups=0)
    shutil.rmtree(directory / "model")
    write_model(directory / "model", "qwen3_moe_mixed")
    assert main(launch(directory, 1, 'push.engines=["http://127.0.0.1:9"]')) == 2
    assert "1 of the model's 2 layers are dense, and SGLang's qwen3_moe has experts" in capsys.readouterr().err


def test_the_directory_of_another_run_stays_as_it_is(lives: Lives, tmp_path: Path) -> None:
    directory = prepare(tmp_path, groups=0)
    assert lives.live(*launch(directory, 0)) == [0], lives.log_end()
    weights = directory / "out" / "models" / "step-000000" / "model.safetensors"
    before = weights.stat()
    error = lives.error_of(*launch(directory, 0, "run=other"))
    assert (
        "holds the checkpoints of run 'demo', opened 2" in error
        and "this is another run, 'other'; set another" in error
    )
    (directory / "out" / "run.json").write_bytes(b"")
    assert "run.json is damaged (Input data was truncated); delete it if" in lives.error_of(*launch(directory, 0))
    (directory / "out" / "run.json").unlink()  # as in checkpoints written before there were any
    error = lives.error_of(*launch(directory, 0, "run=other"))
    assert "holds step-000000 of another run, as 'other' has published nothing yet; set another output" in error
    assert lives.live(*launch(directory, 0)) == [0], lives.log_end()
    after = weights.stat()
    assert (after.st_ino, after.st_mtime) == (before.st_ino, before.st_mtime)


def test_a_checkpoint_of_another_model(lives: Lives, tmp_path: Path) -> None:
    directory = prepare(tmp_path, groups=0)
    assert lives.live(*launch(directory, 0)) == [0], lives.log_end()
    write_model(directory / "other", "qwen2")
    error = lives.error_of(*launch(directory, 0, "model=other"))
    assert "step-000000 was saved with family = qwen3 and this run has qwen2; use the saved value, or start" in error


def test_a_checkpoint_that_is_damaged(lives: Lives, tmp_path: Path) -> None:
    directory = prepare(tmp_path, groups=0)
    assert lives.live(*launch(directory, 0)) == [0], lives.log_end()
    checkpoint = directory / "out" / "checkpoints" / "step-000000"
    [file] = checkpoint.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    assert f"{checkpoint} is damaged (" in (error := lives.error_of(*launch(directory, 0))), error
    file.unlink()
    assert f"{checkpoint} is damaged (" in (error := lives.error_of(*launch(directory, 0))), error


def test_a_path_over_the_budget_stops_no_run(lives: Lives, tmp_path: Path) -> None:
    directory = prepare(tmp_path, groups=1)
    long = new_completion(0, [1] * 60, [2] * 8, "v1")
    record(directory, long, new_completion(0, [1, 2], [3], "v1"))
    assert lives.live(*launch(directory, 1), "--nproc", "2", ranks=2) == [0, 0], lives.log_end()
    [_, step] = metrics(directory)
    assert step["excluded_tokens"] == {"too_long": 8} and step["trained_tokens"] == 33
    assert step["alarms"] == ["too_long_tokens"] and step["valid_rollouts"] == 6 and step["reward_mean"] == 0.5
    assert query(directory, "select state, step from groups") == [("CONSUMED", 1)] * 2


def test_a_token_that_the_model_does_not_know(lives: Lives, tmp_path: Path) -> None:
    directory = prepare(tmp_path, groups=1)
    record(directory, new_completion(0, [1, 200], [2], "v1"), new_completion(0, [1, 2], [3], "v1"))
    error = lives.error_of(*launch(directory, 1))
    assert "the pool holds token id 200, and" in error and "has a vocabulary of 96; set model to the one" in error


def test_completions_without_logprobs_are_counted_excluded_and_said(lives: Lives, tmp_path: Path) -> None:
    directory = prepare(tmp_path, groups=1)
    whole, bare = new_completion(0, [1, 2], [3, 4, 5], "v1"), new_completion(0, [1, 2], [6, 7], "v1")
    record(directory, whole, replace(bare, logprobs=array("f")), whole)
    assert lives.live(*launch(directory, 1)) == [0], lives.log_end()
    [step] = metrics(directory)[1:]
    assert step["excluded_tokens"] == {"logprobs_missing": 2} and step["trained_tokens"] == 4 * 8 + 2 * 3
    assert "(2 not trained: logprobs_missing)" in lives.log_end()


def test_tokens_of_another_tokenizer(lives: Lives, tmp_path: Path) -> None:
    directory = prepare(tmp_path, groups=2)
    pool = open_pool(str(directory / "pool.db"))
    proxy_id = register_proxy(pool, "0123456789abcdef")
    with pool.write() as connection:
        connection.execute(update(completions).values(proxy_id=proxy_id))
    pool.close()
    assert lives.live(*launch(directory, 0)) == [0], lives.log_end()  # its tokenizer.json says nothing: no check
    tokens = {f"t{id}": id for id in range(VOCABULARY)}
    (directory / "model" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
    for verb in (launch(directory, 1), ["sft", str(directory / "trainer.toml"), *SFT]):
        error = lives.error_of(*verb)
        assert "holds tokens of the tokenizer 0123456789abcdef, and" in error and "set model to one with" in error
    assert query(directory, "select count(*) from groups where state = 'CONSUMED'") == [(0,)]
