"""The device that this rank trains on, and the backend of its collectives.

trainer/data and trainer/push, which know no Megatron, ask torch themselves whether there is a GPU. How megatron.core
runs where there is none: cpu.py.
"""

from dataclasses import dataclass

import torch

from proxy.pool.errors import UserError


@dataclass(frozen=True)
class Device:
    """The device for this rank's tensors, and the backend for its collectives."""

    torch_device: torch.device
    backend: str
    """Of torch.distributed: nccl or gloo."""


def has_gpu() -> bool:
    """Whether this process has a CUDA device."""
    return torch.cuda.is_available()


def choose_device(local_rank: int) -> Device:
    """Choose this rank's GPU with NCCL, and make it torch's current one; without GPUs the CPU with gloo.

    `local_rank`: the rank on this machine. UserError when there are GPUs, but none for this rank.
    """
    if not has_gpu():
        return Device(torch.device("cpu"), "gloo")
    demand_gpu(local_rank, torch.cuda.device_count())
    torch.cuda.set_device(local_rank)
    return Device(torch.device("cuda", local_rank), "nccl")


def demand_gpu(local_rank: int, gpus: int) -> None:
    """Raise UserError for a rank without a GPU of its own: NCCL refuses two ranks on one."""
    if local_rank >= gpus:
        raise UserError(
            f"rank {local_rank} of this machine has no GPU, as ranks count from 0 and there are {gpus}; set --nproc or "
            "torchrun's --nproc-per-node to at most that, or check CUDA_VISIBLE_DEVICES"
        )
