"""Asks torch and SGLang's kernels, in a process of its own: `python -m proxy.doctor.probe`. Prints one JSON object."""

import importlib
import os
import sys
from collections.abc import Iterable

import msgspec

from proxy.engine.sglang import on_cuda
from proxy.engine.toolkit import cuda_home
from proxy.pool.machine.torch_build import TorchBuild, read_torch

KERNELS = ("sgl_kernel", "flashinfer", "flash_attn.cute", "deep_gemm")
"""Modules of CUDA kernels that SGLang calls. Without a GPU none of them can be imported, so none is tried."""


class EngineProbe(msgspec.Struct, frozen=True, kw_only=True):
    """What the libraries of the engine said."""

    torch: TorchBuild = TorchBuild()
    kernels: dict[str, str] = {}
    """Each of KERNELS with its version, where there is a GPU."""
    broken: dict[str, str] = {}
    """Those that cannot be imported, with the reason."""
    error: str = ""
    """Why there is no answer at all."""


def probe() -> EngineProbe:
    """Import what the engine would import."""
    torch = read_torch()
    kernels, broken = import_kernels(KERNELS if on_cuda("auto") else ())
    return EngineProbe(torch=torch, kernels=kernels, broken=broken)


def import_kernels(names: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Import these modules: their versions, and why some cannot be imported. deep_gemm cannot without a toolkit."""
    if home := cuda_home(os.environ):
        os.environ["CUDA_HOME"] = str(home)
    kernels, broken = {}, {}
    for name in names:
        try:
            kernels[name] = str(getattr(importlib.import_module(name), "__version__", "present"))
        except Exception as error:  # whatever a library raises on import is the answer
            broken[name] = in_short(f"{type(error).__name__}: {error}")
    return kernels, broken


def in_short(error: str) -> str:
    """A long message on one line, without its middle: sgl_kernel tells the places it looked at, and last the reason."""
    line = " ".join(error.split())
    return line if len(line) <= 400 else f"{line[:100]} ... {line[-300:]}"


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(probe()).decode() + "\n")
