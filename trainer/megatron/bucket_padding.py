"""Where a parameter lies in the optimizer's state as Megatron gathers it for a checkpoint.

The distributed optimizer pads its buckets to divide them over the data ranks, and megatron-core 0.16.1 gathers their
state without that padding but cuts it by positions that count it: of several buckets, all but the first are saved
shifted. There are several where an embedding is shared by two pipeline stages. Left out: everything that is right.
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
    """Within the block, positions do not count the padding between buckets."""
    buffers = [buffer for part in parts(optimizer) if isinstance(part, DistributedOptimizer) for buffer in part.buffers]
    padded = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            buffer.param_index_map = _positions(buffer)
        yield
    finally:
        for buffer, positions in zip(buffers, padded, strict=True):
            buffer.param_index_map = positions


def _positions(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    starts = [0, *accumulate(bucket.numel_unpadded for bucket in buffer.buckets)]
    shifts = [start - bucket.offset for start, bucket in zip(starts, buffer.buckets, strict=False)]
    places = buffer.param_index_map.items()
    return {param: (first + shifts[at], end + shifts[at], at) for param, (first, end, at) in places}
