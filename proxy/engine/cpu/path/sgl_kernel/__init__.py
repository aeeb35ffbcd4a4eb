"""A pure-torch stand-in for the CUDA-only `sgl_kernel` wheel: just enough for SGLang 0.5.23 with
SGLANG_USE_CPU_ENGINE=1.

On a CPU, SGLang calls few of its kernels: cache bookkeeping, and attention and verification for speculative decoding
with one draft chain (top-k 1). Their names and arguments are SGLang's; results are written into the tensors that it
passes. Any other name can be imported; calling it raises NotImplementedError. Refuses to load where CUDA exists, as the
real wheel must be used there.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

if torch.cuda.is_available():
    raise ImportError(
        f"the CPU stand-in for sgl_kernel in {__path__[0]} refuses to load beside CUDA; "
        "take that folder off PYTHONPATH and install sglang-kernel"
    )

from sgl_kernel import _attention
from sgl_kernel._cache import (  # noqa: F401
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
)
from sgl_kernel._speculative import (  # noqa: F401
    build_draft_decode_metadata_cpu,
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.4.10"
BLACKFORGE_STANDIN = True

torch.ops.sgl_kernel.decode_attention_cpu = _attention.decode
torch.ops.sgl_kernel.extend_attention_cpu = _attention.extend


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"the CPU stand-in for sgl_kernel has no {name}")

    return missing


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes these submodules importable. Others must raise ImportError, which SGLang catches."""

    names = ("sgl_kernel.speculative", "sgl_kernel.mamba", "sgl_kernel.kvcacheio")

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in self.names else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        package = sys.modules[__name__]
        module.__getattr__ = lambda name: package.__dict__.get(name) or __getattr__(name)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())
