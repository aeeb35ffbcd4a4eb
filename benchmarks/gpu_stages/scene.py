"""What all stages share: the device, small or full sizes, times, memory, and a job of one process."""

import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from trainer.megatron.parallel import Ranks


@dataclass(frozen=True)
class Scene:
    """Where a stage runs, and how large."""

    device: torch.device
    small: bool
    """Sizes that a CPU computes in seconds: they check the stage, and measure nothing."""
    directory: Path
    machine: str
    errors: list[str] = field(default_factory=list)
    """What parts of the stage failed with."""
    lacking: list[str] = field(default_factory=list)
    """What the machine lacks for parts of the stage, which were left out."""

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    def tried(self, part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the figures of a part of the stage. If it fails or lacks something, note that: the next part runs."""
        try:
            return part()
        except ImportError as error:
            self.lacking.append(str(error))
            return {"lacks": str(error)}
        except Exception as error:  # also what torch and Triton raise
            traceback.print_exc()
            self.errors.append(f"{type(error).__name__}: {error}"[:1000])
            return {"error": self.errors[-1]}
        finally:
            self.free()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.gpu:
            torch.cuda.synchronize()

    def free(self) -> None:
        """Return memory that the allocator keeps, before the next model is built."""
        if self.gpu:
            torch.cuda.empty_cache()

    def milliseconds(self, compute: Callable[[], object], repeats: int, warm_up: int = 2) -> float:
        """Return the median of `repeats` runs after some that warm up."""
        times = []
        for _ in range(warm_up + repeats):
            self.synchronize()
            began = time.perf_counter()
            compute()
            self.synchronize()
            times.append(1000 * (time.perf_counter() - began))
        return median(times[warm_up:])

    def peak_bytes(self, compute: Callable[[], object]) -> int:
        """Return the memory that a call takes at its peak beside what was there before.

        Without a GPU: the bytes of the largest tensor that it makes.
        """
        if not self.gpu:
            with LargestTensor() as largest:
                compute()
            return largest.bytes
        self.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        compute()
        self.synchronize()
        return torch.cuda.max_memory_allocated() - before


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns within the block."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for value in returned if isinstance(returned, tuple | list) else (returned,):
            if isinstance(value, Tensor):
                self.bytes = max(self.bytes, value.numel() * value.element_size())
        return returned


def make_scene(small: bool, directory: Path) -> Scene:
    """Return the scene of this process: its GPU, or small sizes on a CPU."""
    gpu = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if gpu else f"{os.cpu_count()} cores, {platform.machine()}, no GPU"
    machine = f"{name}; torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    return Scene(torch.device("cuda", 0) if gpu else torch.device("cpu"), small or not gpu, directory, machine)


@contextmanager
def one_rank() -> Iterator["Ranks"]:
    """A job of this process alone."""
    from trainer.config import Parallel
    from trainer.megatron.parallel import process_groups  # megatron-core may be missing

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    # Without a network the machine's own name may have no address.
    os.environ.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    with process_groups(Parallel()) as ranks:
        yield ranks


def relative(actual: Tensor, exact: Tensor) -> float:
    """Return the norm of the difference over the norm of what is exact; NaN stays NaN."""
    wide = exact.double()
    return float((actual.double() - wide).norm() / wide.norm())
