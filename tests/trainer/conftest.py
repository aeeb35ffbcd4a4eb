"""A small model for the tests of the trainer, its weights, servers to push them to, a trainer that may be killed."""

from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import need
from tests.trainer.lives import Lives
from tests.trainer.sglang_double import Double, Doubles, Start
from trainer.push.weights import Weights


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

    async def started(*some: Double, port: int | None = None) -> tuple[str, ...]:
        return await doubles.start(some, port)

    yield started
    await doubles.close()


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """The trainer's worker, loaded once, to be started often."""
    need("megatron-core", find_spec("megatron") is not None)
    lives = Lives(tmp_path_factory.mktemp("lives") / "log")
    yield lives
    lives.close()
