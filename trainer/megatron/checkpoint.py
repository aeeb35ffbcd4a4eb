"""Checkpoints of model and optimizer by Megatron's dist_checkpointing: any tensor and data split can read them.

A checkpoint directory is complete and on disk before it has its name (trainer/megatron/durable.py). Files are written
in this process: Megatron's default forks writers and starts a manager process, seconds for a small model.
Left out: saving in the background.
"""

import queue
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer

from proxy.pool.errors import UserError
from trainer.megatron import durable
from trainer.megatron.model import PolicyModel


class _InProcess(TorchDistSaveShardedStrategy):
    """The torch_dist format, written by this process into one file a rank."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        filesystem_async._results_queue = queue.Queue()  # else a manager process is started for it

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, plan: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, plan)
        write = partial(_write_buckets, writer.transforms) if writer.write_buckets else None
        return request._replace(async_fn=write)


def _write_buckets(transforms: Any, _rank: int, buckets: list[Any], results: "queue.Queue[Any]") -> None:
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        done: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(index)
        FileSystemWriterAsync.write_preloaded_data([transforms], index, bucket, done, count, use_fsync=True)
        written[index] = done.get_nowait()[1]
    failures = [result for result in written.values() if isinstance(result, Exception)]
    results.put(failures[0] if failures else written)


class Checkpoints:
    """Saves and loads one model with its optimizer."""

    def __init__(self, model: PolicyModel, optimizer: MegatronOptimizer):
        self.model, self.optimizer = model, optimizer
        self._strategy = _InProcess()

    def save(self, target: Path, step: int) -> None:
        """Write a durable checkpoint. Collective."""
        if dist.get_rank() == 0:
            durable.begin(target)
        dist.barrier()
        directory = durable.unfinished(target)
        state = {**self._state(loading=False), "step": step}
        dist_checkpointing.save(state, str(directory), self._strategy, validate_access_integrity=False)
        if dist.get_rank() == 0:
            durable.commit(target)
        dist.barrier()

    def load(self, source: Path) -> int:
        """Restore model and optimizer; returns the step of the checkpoint. Collective."""
        if not (source / "metadata.json").exists():
            raise UserError(f"{source} is not a complete checkpoint; restore it or start a new run with another output")
        state = dist_checkpointing.load({**self._state(loading=True), "step": 0}, str(source))
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def _state(self, loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.model.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}
