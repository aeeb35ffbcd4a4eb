"""FlexAttention over prefix trees, with a block mask that is computed from the ends of the subtrees.

No N x N mask ever exists: a block of queries and a block of keys are compared by the smallest and the largest subtree
end among the keys. Left out: choosing a kernel (trainer/megatron/attention/kernels.py).
"""

from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from proxy.pool.terminal.progress import progress
from trainer.data.to_device import to_device
from trainer.megatron.attention.layout import AttentionLayout

BLOCK = 128
"""Queries, and keys, in a block: the kernel computes or skips a block as a whole."""
COMPILATIONS = 64
"""How often torch may compile the kernel in one process. It does so again with and without gradients, for one token,
for one block and for more, and for some sizes that its code generator tells apart. Its own limit is 8, and the ninth
case would end the run, perhaps after hours."""


def flexible(query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """[1, heads, queries, d], [1, key heads, keys, d] twice -> [1, heads, queries, d]. Keys are all tokens.

    Compiled on a GPU, always by torch's general kernel: for fewer than 128 queries torch would take its kernel for
    decoding, and torch 2.11 fails to compile that where several heads share a key's and have more than 128 queries
    together. On a CPU it runs torch's uncompiled reference, which tests compare with: that computes all scores
    and has no gradient.
    """
    mask, grouped = block_mask(layout, query.device), query.shape[1] != key.shape[1]
    kernel = flex_attention if query.device.type == "cpu" else compiled()
    return kernel(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped, kernel_options={"BACKEND": "TRITON"}
    )


def compiled() -> Any:
    """Return the compiled kernel, and let torch compile it COMPILATIONS times in the calling thread.

    Since torch 2.12 each thread has a limit of its own. With `parallel.recompute`, layers are computed again in
    autograd's threads.
    """
    from torch._dynamo import config  # seconds of CPU, which only a GPU's kernel needs

    if config.recompile_limit < COMPILATIONS:
        config.recompile_limit = COMPILATIONS
    return _kernel()


@lru_cache(maxsize=1)
def _kernel() -> Any:
    """Make the kernel once, for all lengths (`dynamic`): micro-batches differ in length."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        show_compiling()
    # fullgraph: an error where torch would otherwise compile no more kernels and compute all scores at once
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@lru_cache(maxsize=1)
def show_compiling() -> None:
    """Show from now on for how long torch compiles: the first step on a GPU waits for it, forward and backward.

    torch does not say how far it is.
    """
    from torch._dynamo import on_compile_end, on_compile_start

    shown = ExitStack()
    on_compile_start(lambda _: shown.enter_context(progress("compiling the attention kernel")))
    on_compile_end(lambda _: shown.close())


@lru_cache(maxsize=2)
def block_mask(layout: AttentionLayout, device: torch.device) -> BlockMask:
    """The mask of a layout, in O((N / BLOCK)^2) time. Cached: all layers of a pass share it.

    Where key j has the subtree end last[j], query i attends to it if and only if j <= i < last[j].
    """
    lengths = [run.end - run.start for run in layout.runs]
    last = to_device(np.repeat([run.last for run in layout.runs], lengths), device)
    first, end = layout.queries
    offset = torch.full((), first, device=device)

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Tensors only: the kernel would be compiled again for each new number.
        return (key <= query + offset) & (query + offset < last[key])

    partial, every = _compare_blocks(last, first, end)
    counts, indices = _indices(partial & ~every)
    full_counts, full_indices = _indices(every)
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK, allowed, (end - first, len(last))
    )


def _compare_blocks(last: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
    """[query blocks, key blocks] twice: whether some pair may attend, and whether all pairs do.

    `some` may be true for a block at the border without any pair that attends: that costs time, not correctness.
    """
    size = len(last)
    pad = -size % BLOCK
    latest = torch.nn.functional.pad(last, (0, pad), value=0).view(-1, BLOCK).amax(1)
    earliest = (
        torch.nn.functional.pad(last, (0, pad), value=0).view(-1, BLOCK).amin(1)
    )  # padded with 0, so that an incomplete block is never full
    query = torch.arange(first, end, BLOCK, device=last.device)[:, None]
    key = torch.arange(0, size, BLOCK, device=last.device)[None]
    after = (query + BLOCK).clamp_max(end)
    some = (key < after) & (latest[None] > query)
    every = (key + BLOCK - 1 <= query) & (query + BLOCK <= earliest[None]) & (query + BLOCK <= end)
    return some, every


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[1, 1, query blocks] how many key blocks each query block has; [1, 1, query blocks, key blocks] these first."""
    indices = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return blocks.sum(1).int()[None, None].contiguous(), indices[None, None].contiguous()
