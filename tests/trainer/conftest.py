"""One rank of a training job inside the test process."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import need

if TYPE_CHECKING:
    from trainer.megatron.parallel import Ranks

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    """The only rank of a job; Megatron's groups are global, so there is one for the session."""
    need("megatron-core", importlib.util.find_spec("megatron") is not None)
    from trainer.megatron.parallel import process_groups  # loads torch, which only these tests need

    os.environ.update(ALONE)
    with process_groups(tensor_parallel=1) as ranks:
        yield ranks


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random Qwen3 of two layers in Hugging Face format."""
    from tests.trainer.make import write_model  # loads torch, which only these tests need

    return write_model(tmp_path / "model")
