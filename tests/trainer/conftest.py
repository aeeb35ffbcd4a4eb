"""A small model for the tests of the trainer."""

from pathlib import Path

import pytest


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A random Qwen3 of two layers in Hugging Face format."""
    from tests.trainer.make import write_model  # loads torch, which only these tests need

    return write_model(tmp_path / "model")
