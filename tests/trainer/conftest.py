"""What several tests of the trainer use."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import need
from tests.trainer.lives import Lives


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random Qwen3 of two layers in Hugging Face format."""
    from tests.trainer.make import write_model  # loads torch, which only these tests need

    return write_model(tmp_path / "model")


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """The trainer's worker, loaded once, to be started often."""
    need("megatron-core", find_spec("megatron") is not None)
    lives = Lives(tmp_path_factory.mktemp("lives") / "log")
    yield lives
    lives.close()
