"""FlexAttention over prefix trees, with a block mask made from the ends of the subtrees.

No mask of N x N exists at any time: a block of queries and keys is judged by the least and the greatest end among its
keys. Left out: choosing a kernel (trainer/megatron/attention/kernels.py).
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.megatron.layout import AttentionLayout

BLOCK = 128
"""Queries, and keys, of a block: what the kernel decides on at once."""


def flexible(query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """[1, heads, queries, d], keys and values of all tokens and maybe fewer heads -> [1, heads, queries, d].

    Compiled on a GPU. On a CPU it is torch's reference, of use in tests: it makes the whole scores and has no gradient.
    """
    mask, grouped = block_mask(layout, query.device), query.shape[1] != key.shape[1]
    kernel = flex_attention if query.device.type == "cpu" else compiled()
    return kernel(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)


@lru_cache(maxsize=1)
def compiled() -> Any:
    """The fused kernel, made for lengths of all kinds at once."""
    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=2)
def block_mask(layout: AttentionLayout, device: torch.device) -> BlockMask:
    """The mask of a layout; made once per pass and shared by its layers. Takes (N / BLOCK)^2 steps of judging.

    Where key j has the subtree end last[j], query i attends to it if and only if j <= i < last[j].
    """
    lengths = torch.tensor([run.end - run.start for run in layout.runs], device=device)
    last = torch.tensor([run.last for run in layout.runs], device=device).repeat_interleave(lengths)
    first, end = layout.queries

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + first) & (query + first < last[key])

    some, every = _judged(last, first, end)
    counts, indices = _listed(some & ~every)
    full_counts, full_indices = _listed(every)
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK, allowed, (end - first, len(last))
    )


def _judged(last: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    """[blocks of queries, blocks of keys]: whether some pair attends, or only might at the border; whether all do."""
    size = len(last)
    pad = -size % BLOCK
    latest = torch.nn.functional.pad(last, (0, pad), value=0).view(-1, BLOCK).amax(1)
    earliest = torch.nn.functional.pad(last, (0, pad), value=0).view(-1, BLOCK).amin(1)  # 0: a block that is cut
    query = torch.arange(first, end, BLOCK, device=last.device)[:, None]
    key = torch.arange(0, size, BLOCK, device=last.device)[None]
    after = (query + BLOCK).clamp_max(end)
    some = (key < after) & (latest[None] > query)
    every = (key + BLOCK - 1 <= query) & (query + BLOCK <= earliest[None]) & (query + BLOCK <= end)
    return some, every


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and which come first in its row; one batch, one head."""
    indices = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return blocks.sum(1).int()[None, None].contiguous(), indices[None, None].contiguous()
