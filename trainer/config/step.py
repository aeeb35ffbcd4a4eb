"""What one train step does with its groups: sections of the configuration as they are, and what changes by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config import Config, Loss
from trainer.config.batch import TRAINED
from trainer.config.credit import Credit
from trainer.config.model_shape import ExpertShape


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What the configuration says about a step's groups; credit assignment and assembly read it."""

    loss: Loss = Loss()
    credit: Credit = Credit()
    labels: Sequence[str] = TRAINED
    """Completions with these labels are trained on."""
    max_staleness: int | None = None
    """Rollouts whose oldest token lags further behind are left out of the loss. None: no rollout is."""
    mixture: ExpertShape | None = None
    """Replay the experts that the engine chose in this mixture. None: the trainer's routers choose."""
    max_tokens: int | None = None
    """Completions whose paths are longer are left out of the loss. None: no completion is."""
    step: int = 1
    scales: Mapping[str, Any] = field(default_factory=dict)
    """The running deviations before the step, by domain, as the pool holds them (trainer/credit/scales.py)."""


def step_options(
    config: Config, step: int, mixture: ExpertShape | None = None, scales: Mapping[str, Any] | None = None
) -> StepOptions:
    """Return the options of a step. `mixture`: from trainer/data/routed_experts.py: replayed. `scales`: what the pool
    holds of the steps before it."""
    return StepOptions(
        loss=config.loss,
        credit=config.credit,
        labels=config.batch.labels,
        max_staleness=config.batch.rule().max_staleness,
        mixture=mixture,
        max_tokens=config.batch.max_tokens,
        step=step,
        scales=scales or {},
    )
