"""MagiAttention's flex-flash-attention over prefix trees, for GPUs where it is installed.

Its input is what the layout gives: slices of contiguous queries and keys, each full or causal, with no pair in two of
them. Left out: its own distribution over context-parallel ranks (ours gather keys and values); deterministic backward
passes.
"""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.data.to_device import to_device
from trainer.megatron.attention.layout import AttentionLayout, slices

FULL, CAUSAL = 0, 1
"""MagiAttention's codes for slices. Its causal mask is aligned to the last query and key: in a square, the diagonal."""
MAX_HEAD_DIM = 128
"""The largest head dimension that its kernels support."""


def fits(query: Tensor) -> bool:
    """Whether MagiAttention is installed and supports these heads."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return half and query.shape[-1] <= MAX_HEAD_DIM and installed()


def installed() -> bool:
    """Whether MagiAttention is installed. PyPI's `magi-attention` 0.0.1 is an empty package of that name."""
    spec = find_spec("magi_attention")
    folders = spec.submodule_search_locations if spec else None
    return any(Path(folder, "api").is_dir() or Path(folder, "api.py").is_file() for folder in folders or ())


def ranges(layout: AttentionLayout) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[int]]:
    """The slices as half-open ranges of queries, half-open ranges of keys, and codes."""
    parts = slices(layout)
    kinds = [CAUSAL if part.causal else FULL for part in parts]
    return [part.queries for part in parts], [part.keys for part in parts], kinds


def sliced_flash(query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """[1, heads, queries, d], [1, key heads, keys, d] twice -> [1, heads, queries, d]. Keys are all tokens."""
    from magi_attention.api import flex_flash_attn_func  # optional, and builds kernels when imported

    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    queries, keys, kinds = _on_device(layout, query.device)
    results = flex_flash_attn_func(
        q=q, k=k, v=v, q_ranges=queries, k_ranges=keys, attn_type_map=kinds, softmax_scale=scale
    )
    output: Tensor = results[0]
    return output.transpose(0, 1)[None]


@lru_cache(maxsize=2)
def _on_device(layout: AttentionLayout, device: torch.device) -> tuple[Tensor, ...]:
    """The ranges as tensors. Cached: all layers of a pass share them."""
    return tuple(to_device(np.array(values, dtype=np.int32), device) for values in ranges(layout))
