"""Push inside of the requests, as base64 of pickled tensors: for engines that share neither a disk nor a GPU network.

Each tensor rank of an engine reads its own entry and takes its shard of whole tensors from it, so a request holds a
bucket once per tensor rank. SGLang 0.5.23 refuses this way where it has data-parallel ranks.
"""

import pickle
from base64 import b64encode

from trainer.push.target import PushTarget
from trainer.push.weights import Weights


def send(engine: PushTarget, weights: Weights) -> None:
    """Send bucket after bucket; the last one sets the version and drops the old caches. Raises PushFailed."""
    ranks = engine.about.tp_size
    with engine.session():
        for bucket in weights.buckets(engine.options.BUCKET_BYTES // ranks):
            entry = b64encode(pickle.dumps(bucket.tensors)).decode()
            body = {"serialized_named_tensors": [entry] * ranks, "flush_cache": bucket.last}
            engine.load(
                "/update_weights_from_tensor", body | ({"weight_version": weights.version} if bucket.last else {})
            )
