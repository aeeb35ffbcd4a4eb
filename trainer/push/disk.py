"""By a directory that the engine can read under the same path. Any engine, whatever its parallelism."""

from trainer.push.target import PushTarget
from trainer.push.weights import Weights


def send(engine: PushTarget, weights: Weights) -> None:
    """Have it load the directory and drop the caches of the weights before. Raises PushFailed."""
    where = {"model_path": str(weights.directory.resolve()), "weight_version": weights.version}
    engine.load("/update_weights_from_disk", {**where, "flush_cache": True})
