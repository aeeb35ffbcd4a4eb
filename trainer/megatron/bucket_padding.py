"""A workaround for a bug of megatron-core 0.16.1 in the optimizer's checkpoints.

The distributed optimizer keeps all parameters in flat buckets, and pads each bucket so that it divides evenly over the
data-parallel ranks. To save, Megatron gathers the optimizer's state without that padding, but cuts it into parameters
at positions that still count the padding. So where there are several buckets, the state of all but the first one is
saved shifted. There are several buckets where two pipeline stages share an embedding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from trainer.megatron.optimizer import parts


@contextmanager
def without_padding(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Within the block, parameter positions in the optimizer's buffers do not count the padding."""
    buffers = [buffer for part in parts(optimizer) if isinstance(part, DistributedOptimizer) for buffer in part.buffers]
    padded_positions = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.param_index_map = _positions(buffer)
        yield
    finally:
        for buffer, positions in zip(buffers, padded_positions, strict=True):
            buffer.param_index_map = positions


def _positions(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """The buffer's map from parameter to (first, end, bucket), with unpadded positions."""
    starts = [0, *accumulate(bucket.numel_unpadded for bucket in buffer.buckets)]
    shifts = [start - bucket.offset for start, bucket in zip(starts, buffer.buckets, strict=False)]
    entries = buffer.param_index_map.items()
    return {
        param: (first + shifts[bucket_number], end + shifts[bucket_number], bucket_number)
        for param, (first, end, bucket_number) in entries
    }
