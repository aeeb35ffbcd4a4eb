"""Two ways of dividing a model at once, on four ranks: the run of one. Two ranks are the matter of test_ranks.py."""

from pathlib import Path

import pytest

from tests.trainer.test_loop import finish, metrics, prepare
from tests.trainer.torchrun import need_gpus

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
SPLITS = {
    "tensor-pipeline": ("tensor=2", "pipeline=2"),
    "tensor-context": ("tensor=2", "context=2"),
    "tensor-data": ("tensor=2", "distributed_optimizer=true"),
    "context-pipeline": ("context=2", "pipeline=2", "recompute=true"),
    "pipeline-data": ("pipeline=2", "distributed_optimizer=true"),
}
SMALL = ("--set", "optimizer.lr=1e-4")
"""At the tests' rate, Adam's first steps make more of the rounding than four ranks do."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    directory = prepare(tmp_path_factory.mktemp("one"))
    finish(directory, *SMALL)
    return reached(directory)


def reached(directory: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in metrics(directory)[1:]]


@pytest.mark.parametrize("split", SPLITS)
def test_four_ranks_train_the_run_of_one(split: str, alone: list[tuple[float, float]], tmp_path: Path) -> None:
    need_gpus(4)
    chosen = [word for setting in SPLITS[split] for word in ("--set", f"parallel.{setting}")]
    finish(prepare(tmp_path), *SMALL, *chosen, "--nproc", "4")
    assert len(alone) == 3
    for values, expected in zip(reached(tmp_path), alone, strict=True):
        assert values == pytest.approx(expected, rel=1e-3, abs=1e-5)
