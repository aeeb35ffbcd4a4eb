"""Two processes against one: the same weights, losses, gradients and checkpoints, whatever the split."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer import two_ranks
from tests.trainer.make import make_config, write_model
from tests.trainer.test_weights import same_files
from trainer.loss import policy_loss
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy
from trainer.rules import rule_of


def run_two(directory: Path, out: Path, split: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "tests.trainer.two_ranks", str(directory), str(out), split]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | {"PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    subprocess.run(command, check=True, env=environment, timeout=200)


@pytest.mark.parametrize("split", [split for split in two_ranks.SPLITS if split != "one"])
def test_two_ranks_learn_what_one_learns(split: str, ranks: Ranks, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    two, one = tmp_path / f"two-{split}", tmp_path / "one"
    one.mkdir()
    two_ranks.work(tmp_path, one, "one", ranks)
    run_two(tmp_path, two, split)
    assert same_files(model, two / "before")
    expected, found = (msgspec.json.decode((path / "reached.json").read_bytes()) for path in (one, two))
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-5)
    assert close_files(two / "after", one / "after")
    # A checkpoint of two ranks goes on in one.
    policy = Policy(model, make_config(tmp_path), ranks)
    assert policy.checkpoints.load(two / "checkpoint") == 1
    loss = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
    for rows in two_ranks.BATCHES[1:]:
        policy.update([rows], sum(len(row.places) for row in rows), loss, 1e-2)
    policy.write_hf(tmp_path / "resumed")
    assert close_files(tmp_path / "resumed", one / "after")


def close_files(left: Path, right: Path) -> bool:
    """Weights after Adam's first steps: equal up to the rounding of sums, far below one step of 1e-2."""
    first, second = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return all((first[name] - second[name]).abs().max() < 2e-4 for name in second)
