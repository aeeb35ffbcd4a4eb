"""How megatron.core is imported: without what nothing here uses, and where there is no CUDA, through a port to the CPU.

`install_cpu_port` installs an import hook that loads `megatron.core` from its own source with a few textual
substitutions: `torch.cuda.X` becomes a stub of this module, `device="cuda"` becomes the CPU. Torch itself is not
changed, and line numbers stay true.

Left out: Megatron's packages for inference, FSDP, resharding and state space models, which nothing here uses; CUDA
streams and graphs, which become no-ops. Which device a rank has: device.py.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import re
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from trainer.megatron.device import has_gpu


def install_cpu_port() -> None:
    """Install the port if CUDA is absent. May be called again; the second call does nothing.

    RuntimeError if megatron.core was imported before: its modules would keep their calls of torch.cuda.
    """
    if has_gpu() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before trainer.megatron; import trainer.megatron first")
    sys.meta_path.insert(0, _Finder())
    warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (are|is) not installed")


def import_megatron() -> None:
    """Import megatron.core without libraries that it imports at once and that nothing here uses.

    They take as much CPU as the rest of a rank's start, and flash_mla, which inference alone calls, ends the process
    where there is no driver. Without a GPU triton is one of them. megatron-core 0.16.1 goes on without each of them.
    """
    unused = ["wandb", "flash_mla"] if has_gpu() else ["wandb", "flash_mla", "triton"]
    absent = [name for name in unused if name not in sys.modules]
    # Importing a name whose module is None raises ImportError. `vars`: the type of sys.modules allows no None.
    vars(sys)["modules"].update(dict.fromkeys(absent))
    try:
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")  # and all that it needs
    finally:
        for name in absent:
            del sys.modules[name]


class _Nothing:
    """A CUDA stream or event that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *args: object) -> None: ...

    # The MoE dispatcher compares its stream with the current one, to wait for it if they differ. Here all are one.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    __hash__ = object.__hash__

    def nothing(self, *args: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = nothing

    def record_event(self, *args: Any) -> "_Nothing":
        return _Nothing()

    def query(self) -> bool:
        return True


class _CpuCuda(types.ModuleType):
    """The stub for `torch.cuda` inside megatron.core: no GPU, no streams, the CPU's random generator."""

    nvtx = types.SimpleNamespace(range_push=lambda *args: None, range_pop=lambda *args: None)
    Stream = Event = _Nothing

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1  # the CPU: Megatron takes ranks modulo this number

    def nothing(self, *args: Any) -> None: ...

    set_device = synchronize = empty_cache = nothing

    def is_current_stream_capturing(self) -> bool:
        return False

    def current_stream(self, *args: Any) -> _Nothing:
        return _Nothing()

    default_stream = current_stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    # A CPU has one random generator, where Megatron keeps one per GPU.
    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        """The rest is torch.cuda's own: classes that are named and not used, decorators, questions about memory."""
        if name not in vars(torch.cuda):
            raise AttributeError(f"torch.cuda has no {name}")
        return vars(torch.cuda)[name]


_stub = _CpuCuda("_cpu_cuda")
_stub.__dict__["random"] = _stub  # Megatron also calls torch.cuda.random.get_rng_state

# For megatron-core 0.16.1. Order matters: the type names come before all other names of `torch.cuda.`, which are the
# second pattern, and `.cuda(...)` comes after it, as its argument may be what the second pattern leaves.
_SUBSTITUTIONS = [
    # The optimizers compare param.type() with these names; a CPU tensor's type has no `cuda` in it.
    (re.compile(r"torch\.cuda\.(Half|BFloat16|Float)Tensor"), r"torch.\1Tensor"),
    # Everything else of torch.cuda goes to the stub, which `_Loader.exec_module` puts into each module's globals.
    # Imports of torch.cuda's modules stay as they are.
    (re.compile(r"(?<!from )(?<!import )\btorch\.cuda\."), "_cpu_cuda."),
    (re.compile(r"""device=(['"])cuda\1"""), "device=_cpu_cuda.current_device()"),
    (re.compile(r"""init_data\((['"])cuda\1\)"""), "init_data('cpu')"),
    (re.compile(r"\.cuda\((non_blocking=True|_cpu_cuda\.current_device\(\))?\)"), ".cpu()"),
    (re.compile(r"pin_memory=True"), "pin_memory=False"),
    # Decorating fused functions loads torch's compiler, a second of CPU; the fusions are off.
    (re.compile(r"jit_fuser = torch\.compile"), "jit_fuser = noop_decorator"),
    # The MoE all-to-all dispatcher turns split sizes into lists only for CUDA tensors; gloo needs the lists too.
    (re.compile(r"if torch\.is_tensor\(tensor\) and tensor\.is_cuda:"), "if torch.is_tensor(tensor):"),
]
_UNTOUCHED = tuple(f"megatron.core.{part}" for part in ("inference", "distributed.fsdp", "resharding", "ssm"))
"""Packages that nothing here uses and that were not checked with the substitutions."""


# They stand for two functions of Megatron, and take the same arguments.
def _set_rng_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _get_rng_state(device: Any = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of megatron.core from its source, with the substitutions."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the substituted source. Never reads or writes a .pyc: the cache would mix the two versions."""
        source = self.get_data(self.path).decode()
        for pattern, replacement in _SUBSTITUTIONS:
            source = pattern.sub(replacement, source)
        code = compile(source, self.path, "exec", dont_inherit=True)
        assert isinstance(code, types.CodeType)
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["_cpu_cuda"] = _stub
        super().exec_module(module)
        if module.__name__ == "megatron.core.tensor_parallel.random":
            # In 0.16.1 these two initialise CUDA through torch's `_lazy_call` and `_lazy_init`, past the stub.
            module.__dict__["_set_cuda_rng_state"] = _set_rng_state
            module.__dict__["_get_cuda_rng_state"] = _get_rng_state


class _Finder(importlib.abc.MetaPathFinder):
    """Gives modules of megatron.core the loader above; leaves all other imports to Python."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron.core") or fullname.startswith(_UNTOUCHED):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(fullname, os.fspath(spec.loader.path))
        return spec
