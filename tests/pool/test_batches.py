"""Batches for slime and verl: which tokens are trained once, and what the other trainers' own classes read."""

import os
import subprocess
import sys
from array import array
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from proxy.commands.main import main
from proxy.pool.completions.records import NewCompletion, VersionSpan, int_bytes
from proxy.pool.database import Pool
from proxy.pool.export.sequences import sequences
from proxy.pool.inspect.trainable_calls import trainable_calls
from proxy.pool.read import rollouts
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import GroupOptions, Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.training.steps import Published, publish
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.conftest import need
from tests.pool.make import TASK, finished_group, new_completion, record
from tests.proxy.sdks import environments

ONE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
"""On one database: what is written does not depend on it."""


def grown(first: NewCompletion, before: tuple[int, list[int]], tail: list[int], sampled: list[int]) -> NewCompletion:
    """A call whose prompt begins with a path of an earlier completion."""
    prefix_of, path = before
    item = new_completion(first.attempt_id, tail, sampled)
    return replace(
        item, prefix_of=prefix_of, prefix_length=len(path), path_crc=crc32(int_bytes([*path, *tail, *sampled]))
    )


@pytest.fixture
def stepped(pool: Pool) -> Pool:
    """Run r: step 1 took a group with a tree of calls, a rollout without a reward and one that cannot be trained."""
    run = open_run(pool, "r", "train", {})
    publish(pool, run.id, Published(step=0, checkpoint="c", hf_dir="m", metrics={}))
    members = open_group(pool, run.id, TASK, 5)
    opened = [open_attempt(pool, member.rollout_id, "command")[0].id for member in members]
    start = new_completion(opened[0])  # 1 2 | 3 4
    [a] = record(pool, [start])
    goes_on = replace(
        grown(start, (a, [1, 2, 3, 4]), [5], [6, 7, 8]), given=((0, 1),), logprobs=array("f", [-0.25, -1.5]),
        versions=(VersionSpan("v1", 1, 3),), finish_reason="length",
    )  # fmt: skip
    fork = grown(start, (a, [1, 2, 3, 4]), [9], [10])
    cut = replace(grown(start, (a, [1, 2, 3]), [], [11]), finish_reason="repetition")
    [_, of_fork, _] = record(pool, [goes_on, fork, cut])
    lost = grown(start, (of_fork, [1, 2, 3, 4, 9, 10]), [12], [13])
    record(pool, [replace(lost, untrainable=Untrained(UntrainedReason.ABANDONED), logprobs=array("f"))])
    for attempt in opened[1:4]:
        record(pool, [new_completion(attempt)])
    record(pool, [replace(new_completion(opened[4]), untrainable=Untrained(UntrainedReason.CONSTRAINED))])
    for member, attempt, reward in zip(members, opened, [1.0, 0.0, 0.5, None, 0.25], strict=True):
        close_attempt(pool, attempt, Ending())
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt, reward=reward))
    assert lease(pool, run.id, 1, LeaseRule(groups=1, window=4, max_staleness=9)) is not None
    return pool


def test_each_trained_token_is_in_one_sequence(stepped: Pool) -> None:
    rollout, *_, constrained = rollouts(stepped)
    assert [part.tokens.tolist() for part in sequences(rollout)] == [
        [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 11], [1, 2, 3, 4, 9, 10, 12, 13],
    ]  # fmt: skip
    chain, cut, fork = sequences(rollout)
    assert chain.mask.tolist() == [0, 0, 1, 1, 0, 0, 1, 1] and (chain.prompt_length, chain.turns) == (2, 2)
    assert chain.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, 0, -0.25, -1.5] and chain.versions == ("v1", "v1")
    assert (cut.mask.tolist(), fork.mask.tolist()) == ([0, 0, 0, 1], [0, 0, 0, 0, 0, 1, 0, 0])
    sampled = sum(sum(item.mask) for item in rollout.completions)
    assert sum(sum(part.mask) for part in (chain, cut, fork)) == sampled == 6
    assert sequences(constrained) == []


def test_what_is_for_evaluation_is_in_no_batch(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    evaluation = open_run(pool, "e", "eval", {})
    for run_id, held_out in ((run.id, True), (evaluation.id, False)):
        [member] = open_group(pool, run_id, TASK, 1, GroupOptions(held_out=held_out))
        attempt, _ = open_attempt(pool, member.rollout_id, "command")
        record(pool, [new_completion(attempt.id)])
        close_attempt(pool, attempt.id, Ending())
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=1.0))
    finished_group(pool, run.id, [1.0])
    whys = [(rollout.run, str(rollout.completions[0].untrained), len(sequences(rollout))) for rollout in rollouts(pool)]
    assert whys == [("r", "held_out", 0), ("r", "None", 1), ("e", "held_out", 0)]
    [calls] = trainable_calls(pool, run.id).values()
    assert (calls.calls, calls.trainable) == (2, 1) and calls.untrained == {Untrained(UntrainedReason.HELD_OUT): 1}


def exported(pool: Pool, kind: str, file: Path, *more: str, status: int = 0) -> Path:
    assert main(["pool", "export", pool.url, "r", "--format", kind, "--output", str(file), *more]) == status
    return file


@ONE
def test_slime_gets_samples(stepped: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("torch", find_spec("torch") is not None)
    import torch

    file = exported(stepped, "slime", tmp_path / "0.pt", "--step", "1")
    said = f"5 samples of 3 rollouts: {file}; 2 rollouts have no reward or nothing to train\n"
    assert capsys.readouterr().out == said
    data: dict[str, Any] = torch.load(file, weights_only=False)
    assert data["rollout_id"] == 0
    samples = data["samples"]
    assert [sample["index"] for sample in samples] == [0, 1, 2, 3, 4]
    chain, cut, *_, last = samples
    assert (chain["tokens"], chain["response_length"], chain["reward"]) == ([1, 2, 3, 4, 5, 6, 7, 8], 6, 1.0)
    assert (chain["loss_mask"], chain["rollout_log_probs"]) == ([1, 1, 0, 0, 1, 1], [-0.5, -0.5, 0, 0, -0.25, -1.5])
    assert [sample["status"] for sample in samples] == ["truncated", "truncated", *["completed"] * 3]
    assert last["weight_versions"] == ["v1"]
    assert chain["rollout_id"] == cut["rollout_id"] != last["rollout_id"] and last["reward"] == 0.5
    assert {sample["group_index"] for sample in samples} == {0} and chain["metadata"]["task"] == "t"
    exported(stepped, "slime", tmp_path / "1.pt", "--step", "2", status=2)
    exported(stepped, "slime", tmp_path / "nowhere" / "0.pt", "--step", "1", status=2)
    assert [path.name for path in tmp_path.glob("*.pt*")] == ["0.pt"]
    assert exported(stepped, "jsonl", tmp_path / "2.jsonl", "--step", "2").read_text() == ""


READ = """
import sys
from tensordict import TensorDict
from verl import DataProto
data = DataProto.load_from_disk(sys.argv[1])
assert type(data) is DataProto and type(data.batch) is TensorDict and len(data) == 5, data
data.check_consistency()
lists = {name: values.tolist() for name, values in data.batch.items()}
for name, values in sorted(lists.items()):
    print(name, values[0])
print("cut", lists["responses"][1], lists["response_mask"][1], lists["attention_mask"][1], lists["rm_scores"][1])
print(lists["prompts"][1:])
print(data.non_tensor_batch["uid"].tolist(), data.non_tensor_batch["__num_turns__"].tolist(), data.meta_info)
again = data.select(batch_keys=["responses"])
again.save_to_disk(sys.argv[1] + ".again")
assert DataProto.load_from_disk(sys.argv[1] + ".again").batch["responses"].tolist() == lists["responses"]
"""


@pytest.mark.long
@ONE
def test_verls_own_class_reads_the_batch(stepped: Pool, tmp_path: Path) -> None:
    need("torch", find_spec("torch") is not None)
    file = exported(stepped, "verl", tmp_path / "1.pkl", "--step", "1")
    path = str(environments.packages_beside_ours("verl"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ, str(file)], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "attention_mask [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]",
        "input_ids [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]",
        "position_ids [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7]",
        "prompts [0, 0, 0, 1, 2]",
        "response_mask [1, 1, 0, 0, 1, 1]",
        "responses [3, 4, 5, 6, 7, 8]",
        "rm_scores [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]",
        "rollout_log_probs [-0.5, -0.5, 0.0, 0.0, -0.25, -1.5]",
        "cut [11, 0, 0, 0, 0, 0] [1, 0, 0, 0, 0, 0] [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0] [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]",
        "[[0, 0, 1, 2, 3], [1, 2, 3, 4, 9], [0, 0, 0, 1, 2], [0, 0, 0, 1, 2]]",
        "['r/0', 'r/0', 'r/0', 'r/0', 'r/0'] [2, 1, 2, 1, 1] {'global_steps': 1}",
    ]
