"""The process groups of a training job: which rank this process is, and the collectives that the trainer calls by name.

A collective is a call that every rank of a group must make, or the others wait for it. Ranks come from the environment
variables of torchrun.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from proxy.pool.errors import PoolError, UserError
from proxy.pool.terminal.progress import Advance, What, progress, unseen
from trainer.config import Parallel
from trainer.megatron.device import Device, choose_device

WAITING_TIMEOUT = timedelta(days=7)
"""How long a rank waits in `Ranks.share`. Rank 0 may wait for rollouts for hours while the others sit there."""
COMPUTING_TIMEOUT = timedelta(minutes=30)
"""How long ranks wait for one another at the start and within a step, before the job ends and says so. Megatron's
groups have the same. The longest such wait is for a rank that reads or writes the weights of a large model."""


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job.

    Ranks split the work in four ways. Data ranks hold the same weights and compute different micro-batches; context
    ranks divide the tokens of one micro-batch; tensor ranks divide each weight matrix; pipeline ranks (stages) divide
    the layers.
    """

    rank: int
    world: int
    data_rank: int
    data_world: int
    context_rank: int
    context_world: int
    tensor_rank: int
    tensor_world: int
    pipeline_world: int
    device: torch.device
    control: dist.ProcessGroup
    """All ranks, over gloo on the CPU: for Python objects and for waiting, which NCCL is not made for."""

    def share(self, make: Callable[[], Any]) -> Any:
        """Run `make` on rank 0 and return its value on every rank. Collective.

        A UserError or PoolError of `make` is raised on every rank, so that no rank is left waiting.
        """
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box[0] = make()
            except (UserError, PoolError) as error:
                box[0] = error  # broadcast like a value, as the other ranks wait for one
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, group=self.control)
        if isinstance(box[0], UserError | PoolError):
            raise box[0]
        return box[0]

    def shown(self, what: What, total: float | None = None, unit: str = "") -> AbstractContextManager[Advance]:
        """Show on rank 0 how far its block is (`progress`), and nothing on the others."""
        return progress(what, total, unit) if self.rank == 0 else nullcontext(unseen)

    def agree(self, value: bool) -> bool:
        """Return whether the value is true on every rank. Collective."""
        flag = torch.tensor(int(value))
        if self.world > 1:
            dist.all_reduce(flag, dist.ReduceOp.MIN, self.control)
        return bool(flag)

    def wait(self) -> None:
        """Wait until every rank is here. Collective."""
        dist.barrier(self.control)

    def from_last_stage(self, values: torch.Tensor | None) -> torch.Tensor:
        """Send a tensor of the last pipeline stage to all stages of this rank's pipeline. Collective."""
        if self.pipeline_world > 1:
            box = [None if values is None else values.cpu()]
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(box, src=last, group=parallel_state.get_pipeline_model_parallel_group())
            values = box[0]
        assert values is not None
        return values.to(self.device)


@contextmanager
def process_groups(parallel: Parallel) -> Iterator[Ranks]:
    """Join the job that torchrun started, and leave it at the end of the block (`job`)."""
    with job() as device, split(parallel, device) as ranks:
        yield ranks


@contextmanager
def job() -> Iterator[Device]:
    """Connect this process to the others of the job. After an error, the connection to others stays.

    NCCL's groups are left together: where one rank has an error, leaving would wait for the others, which wait for
    this rank in their next collective. The process is to end then (trainer/commands/worker.py).
    """
    device = choose_device(int(os.environ["LOCAL_RANK"]))
    # megatron-core 0.16.1 warns at import about libraries that a machine without a GPU cannot have, and torch about
    # collectives of its own that Megatron calls.
    warnings.filterwarnings("ignore", module="megatron.*")
    warnings.filterwarnings("ignore", module="torch.distributed.*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # With its device, NCCL connects the ranks at once, so what prevents it shows at the start, not within a step.
    bound = device.torch_device if device.backend == "nccl" else None
    dist.init_process_group(device.backend, timeout=COMPUTING_TIMEOUT, device_id=bound)
    try:
        yield device
    except BaseException:  # whatever it was: alone, there is nobody to wait for
        if dist.get_world_size() == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def split(parallel: Parallel, device: Device) -> Iterator[Ranks]:
    """Divide the job's processes into Megatron's groups.

    UserError when their number is no multiple of tensor x context x pipeline, or of expert x pipeline.
    """
    if dist.get_world_size() % parallel.copy:
        raise UserError(
            f"{dist.get_world_size()} processes do not split by parallel.tensor = {parallel.tensor} times "
            f"parallel.context = {parallel.context} times parallel.pipeline = {parallel.pipeline}; start a multiple"
        )
    if dist.get_world_size() % (parallel.expert * parallel.pipeline):
        raise UserError(
            f"{dist.get_world_size()} processes do not split by parallel.expert = {parallel.expert} times "
            f"parallel.pipeline = {parallel.pipeline}; start a multiple"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
    )
    try:
        # Megatron asks for seeded generators. Training draws nothing: weights are loaded, and there is no dropout.
        torch.manual_seed(0)
        model_parallel_cuda_manual_seed(0)
        yield Ranks(
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            data_rank=parallel_state.get_data_parallel_rank(),
            data_world=parallel_state.get_data_parallel_world_size(),
            context_rank=parallel_state.get_context_parallel_rank(),
            context_world=parallel.context,
            tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
            tensor_world=parallel.tensor,
            pipeline_world=parallel.pipeline,
            device=device.torch_device,
            control=dist.new_group(backend="gloo", timeout=WAITING_TIMEOUT),
        )
    finally:
        parallel_state.destroy_model_parallel()


def sum_over_data_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum `values` elementwise, in place, over the data-parallel and the context-parallel ranks."""
    dist.all_reduce(values, group=_data_group())
    return values


def max_over_data_ranks(values: torch.Tensor) -> torch.Tensor:
    """Take the elementwise maximum, in place, over the same ranks."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=_data_group())
    return values


def _data_group() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def sum_over_context_ranks(values: torch.Tensor) -> torch.Tensor:
    """Sum `values` elementwise, in place, over the ranks that share a micro-batch."""
    dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
    return values


def over_context_ranks(values: torch.Tensor) -> torch.Tensor:
    """Concatenate the entries of all ranks that share a micro-batch, in the order of ranks, on the CPU."""
    group = parallel_state.get_context_parallel_group()
    parts: list[torch.Tensor] = [values] * group.size()
    dist.all_gather_object(parts, values.cpu(), group=group)
    return torch.cat(parts)


def whole_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """[..., vocabulary of this tensor rank] logits -> [..., whole vocabulary]."""
    return gather_from_tensor_model_parallel_region(logits)
