"""What `trainer launch` and `trainer doctor` check on the configuration and the model directory, without torch."""

from pathlib import Path

from trainer.config import Config
from trainer.config.model_shape import ModelShape, demand_served, demand_splits, read_shape
from trainer.data.routed_experts import replayed


def demand_trainable(config: Config) -> ModelShape:
    """The shape of the configuration's model; UserError when it cannot be trained so."""
    shape = read_shape(Path(config.model))
    demand_splits(shape, config.parallel)
    demand_served(shape, config.push.engines)
    replayed(config.loss, shape)
    return shape
