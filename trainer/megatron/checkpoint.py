"""Checkpoints of model and optimizer in Megatron's dist_checkpointing format.

A run with any other split over its ranks can load them.

A checkpoint directory gets its name only when it is complete and on disk (trainer/megatron/atomic_dir.py). Every rank
writes its part of the files in a thread. Meanwhile the caller may read the weights, for example to export them, but
must not change them.

By default megatron-core 0.16.1 would fork writer processes and start a manager process. That takes seconds even for a
small model, and forking is unsafe beside threads.
"""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer
from torch.distributed.checkpoint.api import CheckpointException

from proxy.pool.errors import UserError
from trainer.megatron import atomic_dir
from trainer.megatron.bucket_padding import without_padding
from trainer.megatron.model.model import PolicyModel
from trainer.megatron.mtp.head import HeadCheckpoint
from trainer.megatron.optimizer import load_state


class _InProcessStrategy(TorchDistSaveShardedStrategy):
    """The torch_dist format, written by this process into one file per rank."""

    def __init__(self) -> None:
        super().__init__("torch_dist", version=1, thread_count=1)
        # megatron-core 0.16.1 starts a manager process for this queue unless the module has one already.
        filesystem_async._results_queue = queue.Queue()

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, plan: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, plan)
        write = partial(_write_buckets, writer.transforms) if writer.write_buckets else None
        return request._replace(async_fn=write)


def _write_buckets(transforms: Any, _rank: int, buckets: list[Any], results: "queue.Queue[Any]") -> None:
    """Write every bucket in this thread, and put the results into `results`, as Megatron's forked writers would.

    If a bucket fails, its exception is put there instead. A bucket is the content of one file.
    """
    results_by_bucket: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        done: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(index)  # write_preloaded_data takes one entry from this queue to say that it is done
        try:
            FileSystemWriterAsync.write_preloaded_data([transforms], index, bucket, done, count, use_fsync=True)
            results_by_bucket[index] = done.get_nowait()[1]
        except Exception as error:  # as in a thread of its own nobody would see it
            results_by_bucket[index] = error
    failures = [result for result in results_by_bucket.values() if isinstance(result, Exception)]
    results.put(failures[0] if failures else results_by_bucket)


class Checkpoints:
    """Saves and loads a model and its optimizer, and a draft head (trainer/megatron/mtp/head.py) and its optimizer.

    `settings` holds values by name that must be the same when a checkpoint is saved and when it is loaded, such as the
    model's shape. Loading refuses a checkpoint with other values. `head` is None when the model has no draft head.
    """

    def __init__(
        self,
        model: PolicyModel,
        optimizer: MegatronOptimizer,
        settings: dict[str, Any],
        head: HeadCheckpoint | None = None,
    ):
        self.model, self.optimizer, self.settings, self.head = model, optimizer, settings, head
        self._strategy = FullyParallelSaveStrategyWrapper(_InProcessStrategy(), _replicas())

    def save(self, target: Path, step: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Write a durable checkpoint. Every rank must call this.

        `meanwhile` runs while the files are written; it must not change the weights. The checkpoint gets its name when
        both are done. Raises UserError on every rank when one rank cannot write its files.
        """
        if dist.get_rank() == 0:
            atomic_dir.begin(target)
        dist.barrier()  # the directory exists before any rank writes into it
        directory = str(atomic_dir.unfinished(target))
        state = {**self._state(loading=False), "step": step, "settings": self.settings}
        request = dist_checkpointing.save(
            state, directory, self._strategy, validate_access_integrity=False, async_sharded_save=True
        )
        with ThreadPoolExecutor(1) as thread:
            if request.async_fn is not None:  # None: this rank has nothing to write
                rank, _, results = request.async_fn_args
                thread.submit(request.async_fn, rank, request.preload_fn(), results)
            meanwhile()
        dist.barrier()  # all files are written before rank 0 collects their metadata
        try:
            for finish in request.finalize_fns:
                finish()
        except CheckpointException as error:  # a BaseException, so `except Exception` would miss it
            raise UserError(
                f"{target} could not be written ({_reasons(error)}); make room on its disk and start again"
            ) from error
        if dist.get_rank() == 0:
            atomic_dir.commit(target)
        dist.barrier()  # no rank goes on before the checkpoint has its name

    def load(self, source: Path) -> int:
        """Restore model and optimizer, and the head; return the step of the checkpoint. Every rank must call this.

        Raises UserError when the directory is incomplete, damaged, or of a run with other settings.
        """
        if not (source / "metadata.json").exists():
            raise UserError(f"{source} is not a complete checkpoint; restore it or start a new run with another output")
        try:
            common = dist_checkpointing.load_common_state_dict(str(source))
            self._check(source, common["settings"])
            self._check_head(source, "head_optimizer" in common)
            state = dist_checkpointing.load({**self._state(loading=True), "step": 0}, str(source))
        except (CheckpointingException, CheckpointException, OSError) as error:
            reason = _reasons(error) if isinstance(error, CheckpointException) else str(error).splitlines()[0]
            raise UserError(
                f"{source} is damaged ({reason}); restore it, or go back to a complete one with `trainer rollback`"
            ) from error
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            load_state(self.optimizer, state["optimizer"])
        if self.head is not None:
            self.head.load(state)
        return int(state["step"])

    def _check(self, source: Path, saved: dict[str, Any]) -> None:
        for name, value in self.settings.items():
            if saved.get(name) != value:
                raise UserError(
                    f"{source} was saved with {name} = {saved.get(name)} and this run has {value}; use the saved "
                    "value, or start a new run with another output"
                )

    def _check_head(self, source: Path, saved: bool) -> None:
        if saved and self.head is None:
            raise UserError(
                f"{source} was saved with an MTP head, which mtp.drafts = 0 would lose; set mtp.drafts above 0 "
                "(mtp.lr = 0 leaves the head as it is), or start a new run from the exported model"
            )
        if self.head is not None and not saved:
            raise UserError(f"{source} was saved without an MTP head; set mtp.drafts = 0 or start a new run")

    def _state(self, loading: bool) -> dict[str, Any]:
        """Return the state as Megatron saves and loads it: each tensor with its place in the unsplit tensor.

        `fully_reshardable`: any other split over ranks can load it. Without this setting, megatron-core 0.16.1 refuses
        to save the distributed optimizer ("ShardedTensor.flattened_range is not supported").

        `mem_efficient`: to save it, the first data rank alone gathers its whole state, in host memory. Otherwise every
        data rank gathers it, on its GPU. Either checkpoint is loaded in the same way.
        """
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": True,
            "dp_cp_group": _replicas(),
        }
        model = self.model.sharded_state_dict(metadata=metadata)
        with without_padding(self.optimizer):
            optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        head = {} if self.head is None else self.head.state(loading, metadata)
        return {"model": model, "optimizer": optimizer, **head}


def _reasons(error: CheckpointException) -> str:
    """The messages of the ranks that failed, each message once."""
    reasons = (str(reason) or repr(reason) for reason, _ in error.failures.values())
    return "; ".join(sorted({reason.splitlines()[0] for reason in reasons}))


def _replicas() -> dist.ProcessGroup:
    """Return the group of ranks that hold the same part of the model. They share the work of saving it."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
