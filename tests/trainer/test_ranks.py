"""Two processes against one: the same weights, losses, gradients and checkpoints, whatever the split."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer import two_ranks
from tests.trainer.make import make_config, write_model
from tests.trainer.test_weights import same_files
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy
from trainer.report import tokens


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One job of two ranks that tries every split: models by family, and what came out by split."""
    directory = tmp_path_factory.mktemp("ranks")
    for family in ("qwen3", "qwen2", "qwen3_moe"):
        write_model(directory / family, family)
    run_two(directory, directory, *two_ranks.SPLITS)
    return directory


def run_two(directory: Path, out: Path, *splits: str) -> None:
    for split in splits:
        (out / split).mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "tests.trainer.two_ranks", str(directory), str(out), *splits]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} | {"PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    subprocess.run(command, check=True, env=environment, timeout=600)


@pytest.mark.parametrize("split", two_ranks.SPLITS)
def test_two_ranks_learn_what_one_learns(split: str, two: Path, ranks: Ranks, tmp_path: Path) -> None:
    model, out, one = two / two_ranks.family(split), two / split, tmp_path / "one"
    one.mkdir()
    two_ranks.work(model, one, {}, ranks)
    assert same_files(model, out / "before")
    expected, found = (msgspec.json.decode((path / "reached.json").read_bytes()) for path in (one, out))
    for tolerance, *both in zip((1e-5, 1e-3, 1e-3), found, expected, strict=True):  # Adam's steps amplify rounding
        assert both[0] == pytest.approx(both[1], rel=tolerance, abs=1e-6)
    assert close_files(out / "after", one / "after")
    for mine, theirs in zip(*(tokens.read(tokens.path(where, 0)) for where in (one, out)), strict=True):
        assert mine.logp == pytest.approx(theirs.logp, rel=1e-5)
        assert mine.coefficient == pytest.approx(theirs.coefficient, rel=1e-4)
    logp, best = torch.load(one / "evaluated-0.pt")
    for rank in (0, 1) if "context" not in split else ():  # of whose ranks each computes a part
        theirs = torch.load(out / f"evaluated-{rank}.pt")
        assert torch.allclose(theirs[0], logp, rtol=1e-5) and torch.equal(theirs[1], best)
    # A checkpoint of two ranks goes on in one.
    policy = Policy(model, make_config(tmp_path, loss=two_ranks.losses(model)), ranks)
    assert policy.checkpoints.load(out / "checkpoint") == 1
    for rows in two_ranks.BATCHES[1:]:
        policy.update([rows], sum(len(row.places) for row in rows), two_ranks.LOSS, 1e-2)
    policy.write_hf(tmp_path / "resumed")
    assert close_files(tmp_path / "resumed", one / "after")


@pytest.mark.parametrize("split", [name for name in two_ranks.SPLITS if name.startswith("pipeline")])
def test_trees_through_a_pipeline_have_the_gradients_of_separate_rows(
    split: str, two: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Micro-batches of different length, every parameter on its stage, the loss on the last one."""
    policy = Policy(two / two_ranks.family(split), make_config(tmp_path), ranks)
    flat = two_ranks.gradients(policy, two_ranks.BATCHES[0], merge=False)
    stages: list[dict[str, Any]] = [torch.load(two / split / f"gradients-{rank}.pt") for rank in (0, 1)]
    assert stages[0].keys() | stages[1].keys() == flat.keys()
    assert ("loss" in stages[0], "loss" in stages[1]) == (False, True)
    both = stages[0].keys() & stages[1].keys()
    assert both == ({"embedding.word_embeddings.weight"} if split == "pipeline-tied" else set())
    for name, gradient in (item for stage in stages for item in stage.items()):
        assert (gradient - flat[name]).norm() <= 1e-5 * flat[name].norm(), name


@pytest.mark.parametrize("split", [name for name in two_ranks.SPLITS if name.startswith("experts")])
def test_trees_through_divided_experts_have_the_gradients_of_separate_rows(
    split: str, two: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Router and experts, also of tokens that came from the other rank; and what else each rank has whole."""
    model = two / two_ranks.family(split)
    policy = Policy(model, make_config(tmp_path, loss=two_ranks.losses(model)), ranks)
    flat = two_ranks.gradients(policy, two_ranks.BATCHES[0], merge=False)
    found: list[dict[str, Any]] = [torch.load(two / split / f"gradients-{rank}.pt") for rank in (0, 1)]
    del flat["loss"]  # of which each rank has a part
    whole = {name for both in found for name in both if name in flat and both[name].shape == flat[name].shape}
    assert whole >= {name for name in flat if ".mlp." in name}
    for name, gradient in ((name, both[name]) for both in found for name in both.keys() & whole):
        assert (gradient - flat[name]).norm() <= 1e-5 * flat[name].norm(), name


def close_files(left: Path, right: Path) -> bool:
    """Weights after Adam's first steps: equal up to the rounding of sums, far below one step of 1e-2."""
    first, second = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return all((first[name] - second[name]).abs().max() < 2e-4 for name in second)
