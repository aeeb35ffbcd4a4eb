"""Push through a directory that the engine can read under the same path. Works for any parallelism of the engine."""

from trainer.push.target import PushTarget
from trainer.push.weights import Weights


def send(engine: PushTarget, weights: Weights) -> None:
    """Make the engine load the directory and drop the caches of the previous weights. Raises PushFailed."""
    request = {"model_path": str(weights.directory.resolve()), "weight_version": weights.version}
    engine.load("/update_weights_from_disk", {**request, "flush_cache": True})
