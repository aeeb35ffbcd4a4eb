"""A small model for the tests of the trainer, its weights, and servers to push them to."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.trainer.sglang_double import Double, Doubles, Start
from trainer.push import Weights


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random Qwen3 of two layers in Hugging Face format."""
    from tests.trainer.make import write_model  # loads torch, which only these tests need

    return write_model(tmp_path / "model")


@pytest.fixture
def weights(model: Path) -> Weights:
    """The model's weights, to be pushed as v7."""
    return Weights("v7", model)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Serves doubles of SGLang until the test ends."""
    doubles = Doubles()

    async def started(*some: Double) -> tuple[str, ...]:
        return await doubles.start(some)

    yield started
    await doubles.close()
