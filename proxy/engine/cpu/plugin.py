"""SGLang plugin (entry point group `sglang.srt.plugins`) that fills gaps of SGLang 0.5.23 on the CPU.

Serving Qwen3 works without it; expert routing, HiCache and disaggregated prefill need it. It does nothing unless this
package's stand-in for `sgl_kernel` is in use, so it does not touch a GPU engine in the same environment.
"""

import functools
import inspect
from typing import Any


def install() -> None:
    """Patch SGLang for CPU; called by SGLang's plugin loader in each of its processes."""
    import sgl_kernel  # SGLang's own kernels where CUDA exists; importable only inside an engine process

    if sgl_kernel.__dict__.get("BLACKFORGE_STANDIN"):
        _host_buffers()
        _host_cache()
        _stream()
        _disaggregation()


def _host_buffers() -> None:
    """Skip cudaHostRegister, which pins the host buffers of HiCache and of expert routing."""
    import sglang.srt.mem_cache.pool_host.common as common

    common._cuda_host_register = lambda *args, **kwargs: None


def _host_cache() -> None:
    """Copy HiCache's level 2 by indexing (`--hicache-io-backend direct`), without pinned memory."""
    import sglang.srt.mem_cache.pool_host.base as base
    import sglang.srt.mem_cache.pool_host.mha as mha

    mha.transfer_kv_direct = _copy_layers
    original = base.HostKVCache.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def without_pinning(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if "pin_memory" in signature.parameters:
            bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    base.HostKVCache.__init__ = without_pinning


def _copy_layers(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices.to(dst.device)] = src[src_indices.to(src.device)]


def _stream() -> None:
    """Add synchronize() to torch.cpu.Stream. It has nothing to wait for: CPU work is done when a call returns."""
    import torch

    if "synchronize" not in vars(torch.cpu.Stream):
        torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]


def _disaggregation() -> None:
    """Let disaggregated prefill over mooncake TCP work without a pinned staging tensor and a CUDA event."""
    try:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender
    except (ImportError, OSError):  # mooncake is not installed, or its libraries are missing: nothing to fix
        return
    MooncakeKVSender.supports_host_tensor_indices = False
