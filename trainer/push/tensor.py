"""In the requests themselves, as base64 of plain pickle: for engines that share neither a disk nor a network of GPUs.

An engine reads the entry of its tensor rank, and every rank takes its own shard of whole tensors, so a request holds a
bucket as often as the engine has tensor ranks. SGLang refuses this way where it has data-parallel ranks.
"""

import pickle
from base64 import b64encode

from trainer.push.target import PushTarget
from trainer.push.weights import Weights


def send(engine: PushTarget, weights: Weights) -> None:
    """Send bucket after bucket; the version, and the end of the old caches, come with the last. Raises PushFailed."""
    ranks = engine.about.tp_size
    with engine.session():
        for bucket in weights.buckets(engine.options.bucket_bytes // ranks):
            entry = b64encode(pickle.dumps(bucket.tensors)).decode()
            body = {"serialized_named_tensors": [entry] * ranks, "flush_cache": bucket.last}
            engine.load(
                "/update_weights_from_tensor", body | ({"weight_version": weights.version} if bucket.last else {})
            )
