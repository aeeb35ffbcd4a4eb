"""Two processes against one: the same weights, losses, gradients and checkpoints, whatever the split."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from tests.trainer import drafting, two_ranks
from tests.trainer.make import make_config, write_model
from tests.trainer.test_weights import same_files
from tests.trainer.torchrun import run_torch
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy
from trainer.report import tokens

pytestmark = pytest.mark.timeout(900)  # the first one waits for the job of all splits


def some_long(splits: Iterable[str]) -> list[Any]:
    """The splits as parameters, of which those that are not SHORT are run by `make test-all` only."""
    return [split if split in two_ranks.SHORT else pytest.param(split, marks=pytest.mark.long) for split in splits]


@pytest.fixture(scope="module")
def tried(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of one rank, by kind, and of one job of two ranks that tries each split that a chosen test needs."""
    chosen = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    splits = sorted({str(item.callspec.params["split"]) for item in chosen})
    directory = tmp_path_factory.mktemp("ranks")
    for family in ("qwen3", "qwen2", "qwen3_moe", "mimo", "qwen3_moe_head"):
        write_model(directory / family, family)
    for kind in {two_ranks.kind(split) for split in splits}:
        two_ranks.work(directory / kind.family, kind.place(directory), kind.parallel(), ranks)
    run_two(directory, directory, *splits)
    return directory


def run_two(directory: Path, out: Path, *splits: str) -> None:
    run_torch("tests.trainer.two_ranks", str(directory), str(out), *splits)


@pytest.mark.parametrize("split", some_long(two_ranks.SPLITS))
def test_two_ranks_learn_what_one_learns(split: str, tried: Path) -> None:
    kind = two_ranks.kind(split)
    model, out, one = tried / kind.family, tried / split, kind.place(tried)
    assert same_files(one / "before", out / "before")
    assert kind.precision != "float32" or same_files(model, out / "before")
    near = 1e-5 if kind.precision == "float32" else 2e-2
    assert reached(out / "first") == [pytest.approx(step, rel=near, abs=near) for step in reached(one / "first")]
    for after in ("after", "resumed"):  # by itself, and from the checkpoint of one rank
        if kind.precision == "float32":  # Adam's first steps make much of little
            assert reached(out / after) == [pytest.approx(step, rel=1e-3, abs=1e-6) for step in reached(one / "after")]
            assert close_files(out / after, one / "after")
    for mine, theirs in zip(*(tokens.read(tokens.path(where / "first", 0)) for where in (one, out)), strict=True):
        assert mine.logp == pytest.approx(theirs.logp, rel=near)
        # One unit of float32's precision at 1, for coefficients near 0: they are differences of numbers near 1.
        assert mine.coefficient == pytest.approx(theirs.coefficient, rel=10 * near, abs=1.2e-7)
    expected = measured(one, 0)
    for rank in (0, 1):  # of two that share micro-batches, each says what both have computed
        assert measured(out, rank) == pytest.approx(expected, rel=near)
    logp, best, leads = torch.load(one / "evaluated-0.pt")
    clear = leads > 10 * near  # the rounding of another split may choose differently between two that are level
    assert clear.sum() >= 0.5 * len(clear)
    for rank in (0, 1) if "context" not in split else ():  # of whose ranks each computes a part
        theirs = torch.load(out / f"evaluated-{rank}.pt")
        assert torch.allclose(theirs[0], logp, rtol=near) and torch.equal(theirs[1][clear], best[clear])


def reached(directory: Path) -> list[list[float]]:
    return msgspec.json.decode((directory / "reached.json").read_bytes(), type=list[list[float]])


def measured(directory: Path, rank: int) -> dict[str, float]:
    return msgspec.json.decode((directory / f"measured-{rank}.json").read_bytes(), type=dict[str, float])


@pytest.mark.parametrize("split", some_long(two_ranks.SPLITS))
def test_a_checkpoint_through_another_split_goes_on_bit_for_bit(
    split: str, tried: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """One rank saves, two ranks load and save again, one rank loads: the steps that follow are the undisturbed ones."""
    kind = two_ranks.kind(split)
    config = make_config(tmp_path, parallel=kind.parallel(), loss=two_ranks.losses(tried / kind.family))
    policy, one = Policy(tried / kind.family, config, ranks), kind.place(tried)
    two_ranks.go_on(policy, tried / split / "saved-again", tmp_path)
    assert reached(tmp_path / "resumed") == reached(one / "after")
    assert same_files(tmp_path / "resumed", one / "after")
    # Two ranks' own checkpoint is what they had reached.
    policy.checkpoints.load(tried / split / "checkpoint")
    policy.write_hf(tmp_path / "first")
    assert same_files(tmp_path / "first", tried / split / "first")


@pytest.mark.parametrize("split", some_long(drafting.SPLITS))
def test_a_head_learns_on_two_ranks_what_it_learns_on_one(
    split: str, tried: Path, ranks: Ranks, tmp_path: Path
) -> None:
    model, out, parallel = tried / drafting.SPLITS[split], tried / split, two_ranks.kind(split).parallel()
    drafting.work(model, tmp_path, parallel, ranks)
    expected, split_result = (msgspec.json.decode((path / "drafting.json").read_bytes()) for path in (tmp_path, out))
    for tolerance, *both in zip((1e-5, 1e-3, 1e-3), split_result, expected, strict=True):  # Adam's first steps amplify
        assert both[0] == pytest.approx(both[1], rel=tolerance, abs=1e-6)
    assert same_files(model, out / "drafting-before")
    assert close_files(out / "drafting-after", tmp_path / "drafting-after")
    policy = Policy(model, make_config(tmp_path, parallel=parallel, mtp=drafting.MTP), ranks)
    assert policy.checkpoints.load(out / "drafting-checkpoint") == 1
    assert drafting.learn(policy, 1) == pytest.approx(expected[1], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("split", some_long(["pipeline", "pipeline-tied"]))
def test_trees_through_a_pipeline_have_the_gradients_of_separate_rows(
    split: str, tried: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Micro-batches of different length, every parameter on its stage, the loss on the last one."""
    policy = Policy(tried / two_ranks.kind(split).family, make_config(tmp_path), ranks)
    flat = two_ranks.gradients(policy, two_ranks.BATCHES[0], merge=False)
    stages: list[dict[str, Any]] = [torch.load(tried / split / f"gradients-{rank}.pt") for rank in (0, 1)]
    assert stages[0].keys() | stages[1].keys() == flat.keys()
    assert ("loss" in stages[0], "loss" in stages[1]) == (False, True)
    both = stages[0].keys() & stages[1].keys()
    assert both == ({"embedding.word_embeddings.weight"} if split == "pipeline-tied" else set())
    for name, gradient in (item for stage in stages for item in stage.items()):
        assert (gradient - flat[name]).norm() <= 1e-5 * flat[name].norm(), name


@pytest.mark.parametrize("split", some_long(["experts", "experts-tensor", "experts-copied", "experts-pipeline"]))
def test_trees_through_divided_experts_have_the_gradients_of_separate_rows(
    split: str, tried: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Gradients of router and experts, also for tokens of the other rank, and of parameters that are not split."""
    model = tried / two_ranks.kind(split).family
    policy = Policy(model, make_config(tmp_path, loss=two_ranks.losses(model)), ranks)
    flat = two_ranks.gradients(policy, two_ranks.BATCHES[0], merge=False)
    split_gradients: list[dict[str, Any]] = [torch.load(tried / split / f"gradients-{rank}.pt") for rank in (0, 1)]
    del flat["loss"]  # of which each rank has a part
    whole = {name for both in split_gradients for name in both if name in flat and both[name].shape == flat[name].shape}
    assert whole >= {name for name in flat if ".mlp." in name}
    for name, gradient in ((name, both[name]) for both in split_gradients for name in both.keys() & whole):
        assert (gradient - flat[name]).norm() <= 1e-5 * flat[name].norm(), name


def close_files(left: Path, right: Path) -> bool:
    """Weights after Adam's first steps: equal up to the rounding of sums, far below one step of 1e-2."""
    first, second = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return all((first[name] - second[name]).abs().max() < 2e-4 for name in second)
