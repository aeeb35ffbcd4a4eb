"""Where a step's files are, and whether a run can go on from them."""

from pathlib import Path

from proxy.pool.training.steps import Version
from trainer.config import Config


def exported(config: Config, step: int) -> Path:
    """Return the directory of a step's weights for the engines."""
    return Path(config.output) / "models" / f"step-{step:06d}"


def checkpoint(config: Config, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return Path(config.output) / "checkpoints" / f"step-{step:06d}"


def reference(config: Config, step: int) -> Path | None:
    """Return the model that the KL term of a step compares with; None where that is the same model in every step."""
    ago = config.loss.kl_steps_ago
    return exported(config, max(0, step - 1 - ago)) if ago else None


def complete(config: Config, version: Version) -> bool:
    """Whether a run can go on from a version: its files are there, and the reference of the step after it is, too."""
    before = reference(config, version.step + 1)
    files = (Path(version.checkpoint), Path(version.hf_dir), *([] if before is None else [before]))
    return all(path.is_dir() for path in files)
