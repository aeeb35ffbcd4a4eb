"""Where metrics are written besides the pool: TensorBoard's event files, Weights & Biases.

An exporter copies the pool: at every start it is written again from the published steps, so that no step is missing
after a crash and none appears twice after a rollback. Not here: figures that are not in the pool.
"""

import importlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from proxy.pool.errors import UserError
from proxy.pool.training.steps import HISTOGRAMS
from trainer.config.report import Report
from trainer.monitor.figures import is_number

FAMILIES = {
    "reward": ("reward_mean", "rollouts", "valid_rollouts"),
    "groups": ("groups", "dropped_groups", "equal_groups", "unplaced_rewards"),
    "loss": ("loss", "grad_norm", "lr", "updates", "entropy", "negative_weight_share", "negative_gradient_share")
    + ("positive_gradient_norm", "negative_gradient_norm"),
    "ratio": ("ratio_mean", "ratio_max", "clip_fraction", "mask_fraction", "extreme_tokens")
    + ("last_ratio_mean", "last_ratio_max", "last_clip_fraction", "last_mask_fraction"),
    "mismatch": ("kl_rollout", "kl_fresh", "logprob_gap_mean"),
    "tokens": ("sampled_tokens", "replayed_tokens", "trained_tokens", "unaccounted_tokens"),
    "speed": ("computed_tokens", "flat_tokens", "call_tokens", "speedup_tokens", "speedup_flops")
    + ("speedup_calls_flops", "flops", "tokens_per_second", "mfu"),
}
LISTS = ("command_counts",)
"""Metrics whose names differ from step to step; they are no curves."""
_FAMILY = {name: family for family, names in FAMILIES.items() for name in names}


class Exporter(Protocol):
    """A place that metrics are written to, step by step. Its methods raise OSError where they cannot write."""

    name: str

    def write(self, step: int, at: float, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step. `at`: Unix seconds of its publication."""

    def close(self) -> None:
        """Write what is buffered."""


def scalars(metrics: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of every finite number in the metrics; a tag is `family/name`."""
    for name, value in metrics.items():
        if isinstance(value, Mapping) and name not in (*HISTOGRAMS, *LISTS):
            yield from ((f"{name}/{key}", float(part)) for key, part in value.items() if is_number(part))
        elif is_number(value):
            yield f"{_FAMILY.get(name) or name.partition('_')[0]}/{name}", float(value)
        elif name == "alarms":
            yield "alarms/raised", float(len(value))


def counts(metrics: Mapping[str, Any]) -> Iterator[tuple[str, dict[int, int]]]:
    """Yield (tag, {value: count}) of every histogram, without the count of unknown values."""
    for name in HISTOGRAMS:
        histogram = {int(value): count for value, count in metrics.get(name, {}).items() if value.isdigit()}
        if histogram:
            yield f"staleness/{name}", histogram


class TensorBoard:
    """Event files. Those of an earlier process are replaced. Raises UserError when the directory is not writable."""

    name = "tensorboard"

    def __init__(self, directory: Path):
        writer = _module("torch.utils.tensorboard", "tensorboard", "every training run")
        try:
            shutil.rmtree(directory, ignore_errors=True)
            self._writer = writer.SummaryWriter(str(directory), flush_secs=10)
        except OSError as error:
            raise UserError(
                f"{directory} cannot be written ({error.strerror}); make room or choose another output"
            ) from error

    def write(self, step: int, at: float, metrics: Mapping[str, Any]) -> None:
        for tag, value in scalars(metrics):
            self._writer.add_scalar(tag, value, step, at)
        for tag, histogram in counts(metrics):
            edges = [edge - 0.5 for edge in range(max(histogram) + 2)]
            self._writer.add_histogram_raw(
                tag,
                min=min(histogram),
                max=max(histogram),
                num=sum(histogram.values()),
                sum=sum(value * count for value, count in histogram.items()),
                sum_squares=sum(value * value * count for value, count in histogram.items()),
                bucket_limits=edges[1:],
                bucket_counts=[histogram.get(value, 0) for value in range(max(histogram) + 1)],
                global_step=step,
                walltime=at,
            )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run. Online it is resumed under its id; offline every process writes all of it.

    `attempt` is added to the id: W&B cannot take steps back, so what follows a rollback becomes a run of its own.
    Raises UserError when the package or the login is missing.
    """

    name = "wandb"

    def __init__(self, directory: Path, report: Report, run: str, attempt: str):
        project = report.wandb
        self._wandb = _module("wandb", "wandb", f"report.wandb = {project}")
        directory.mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._wandb.init(
                project=project,
                id=f"{run}{attempt}",
                name=f"{run}{attempt}",
                group=run,
                dir=str(directory),
                resume=None if os.environ.get("WANDB_MODE") == "offline" else "allow",
                settings=self._wandb.Settings(silent=True, console="off", x_disable_stats=True),
            )
        except self._wandb.Error as error:
            raise UserError(
                f"report.wandb = {project} cannot be logged to ({error}); log in with `wandb login`, set "
                "WANDB_MODE=offline in the environment, or leave report.wandb out"
            ) from error
        self._next = self._run.step

    def write(self, step: int, at: float, metrics: Mapping[str, Any]) -> None:
        if step < self._next:  # the resumed run has it already
            return
        shown: dict[str, Any] = dict(scalars(metrics)) | {"published_at": at}
        for tag, histogram in counts(metrics):
            edges = [edge - 0.5 for edge in range(max(histogram) + 2)]
            values = [histogram.get(value, 0) for value in range(max(histogram) + 1)]
            shown[tag] = self._wandb.Histogram(np_histogram=(values, edges))
        try:
            self._run.log(shown, step=step)
        except self._wandb.Error as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        self._run.finish()


def _module(name: str, package: str, setting: str) -> ModuleType:
    """Import a module that only this setting needs. Raises UserError when its package is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{setting} needs the package {package} ({error}); run `pip install {package}` or change the setting"
        ) from error
