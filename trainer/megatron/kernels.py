"""Kernels of tree attention behind one function. None of them builds a mask of N x N.

CPU: slices. Each run's queries against its own keys are one causal call, the queries of the rest of its subtree against
its keys one full call, both over contiguous ranges; partial results are joined by their log-sum-exp, as flash attention
joins its blocks. GPU: FlexAttention, compiled, with a block mask made from the ends of the subtrees.
Left out: dropout, sliding windows.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainer.packed import Paths
from trainer.tree import Run

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """What attends to what: the runs of the trees, and the stretch of their tokens that the queries are.

    Equal to itself alone: all layers of a pass share one, and what is made from thousands of runs is found by it.
    """

    runs: tuple[Run, ...]
    queries: tuple[int, int]
    paths: Paths | None = None
    """For the balance of experts, with weights as they enter the loss; absent where it has none."""


def tree_attention(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """[1, heads, queries, d], keys and values of all tokens and maybe fewer heads -> [1, heads, queries, d]."""
    if query.device.type == "cpu":
        return _Sliced.apply(query, key, value, slices(layout), scale)
    mask = block_mask(layout, query.device)
    return _compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])


@dataclass(frozen=True, slots=True)
class Slice:
    """Queries and keys of contiguous ranges; causal ones are square. Queries count from the first one of the layout."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


@lru_cache(maxsize=2)
def slices(layout: Layout) -> tuple[Slice, ...]:
    """Every pair of a query and its ancestor exactly once: the causal ones first, which cover every query."""
    first, end = layout.queries
    causal, full = [], []
    for run in layout.runs:
        start, stop = max(run.start, first), min(run.end, end)
        if start < stop:
            causal.append(Slice((start - first, stop - first), (start, stop), True))
            if run.start < start:  # the queries begin in the middle of the run
                full.append(Slice((start - first, stop - first), (run.start, start), False))
        start, stop = max(run.end, first), min(run.last, end)
        if start < stop:
            full.append(Slice((start - first, stop - first), (run.start, run.end), False))
    return (*causal, *full)


class _Sliced(torch.autograd.Function):
    """softmax(q k^T) v over slices. The backward pass gives each slice the whole row's output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: tuple[Slice, ...], scale: float) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)  # many joins in half precision would add up their errors
        output, total = torch.empty_like(query, dtype=wide), query.new_empty(query.shape[:3], dtype=wide)
        for part in parts:
            q, k, v = (tensor[:, :, slice(*at)] for tensor, at in _of(part, query, key, value))
            found, sums = _forward(q, k, v, 0.0, part.causal, scale=scale)
            rows = slice(*part.queries)
            if part.causal:
                output[:, :, rows], total[:, :, rows] = found, sums
            else:
                before = total[:, :, rows]
                joined = torch.logaddexp(before, sums)
                kept, added = (before - joined).exp_()[..., None], (sums - joined).exp_()[..., None]
                output[:, :, rows] = output[:, :, rows] * kept + found * added
                total[:, :, rows] = joined
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.parts, ctx.scale = parts, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        upstream = gradients[0]
        summed = [torch.zeros_like(tensor, dtype=total.dtype) for tensor in (query, key, value)]
        for part in ctx.parts:
            q, k, v = (tensor[:, :, slice(*at)] for tensor, at in _of(part, query, key, value))
            rows = slice(*part.queries)
            found = _backward(
                upstream[:, :, rows],
                q,
                k,
                v,
                output[:, :, rows],
                total[:, :, rows],
                0.0,
                part.causal,
                scale=ctx.scale,
            )
            for into, (_, at), gradient in zip(summed, _of(part, query, key, value), found, strict=True):
                into[:, :, slice(*at)] += gradient
        return (*(gradient.to(query.dtype) for gradient in summed), None, None)


def _of(part: Slice, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, tuple[int, int]]]:
    return [(query, part.queries), (key, part.keys), (value, part.keys)]


@lru_cache(maxsize=1)
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=2)
def block_mask(layout: Layout, device: torch.device) -> BlockMask:
    """FlexAttention's mask of blocks for a layout; made once per pass and shared by its layers."""
    lengths = torch.tensor([run.end - run.start for run in layout.runs])
    last = torch.tensor([run.last for run in layout.runs]).repeat_interleave(lengths).to(device)
    first, end = layout.queries

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query + first) & (query + first < last[key])

    sizes = end - first, layout.runs[-1].end
    return create_block_mask(allowed, None, None, *sizes, device=str(device), _compile=device.type == "cuda")
