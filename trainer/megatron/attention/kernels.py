"""Kernels of tree attention behind one function. None of them builds a mask of N x N.

CPU: slices. Each run's queries against its own keys are one causal call, the queries of the rest of its subtree against
its keys one full call, both over contiguous ranges; partial results are joined by their log-sum-exp, as flash attention
joins its blocks. GPU: MagiAttention by the same slices where it is installed and fits
(trainer/megatron/attention/magi.py), else FlexAttention (trainer/megatron/attention/flex.py). Left out: dropout,
sliding windows.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.megatron.attention import magi
from trainer.megatron.attention.flex import flexible
from trainer.megatron.layout import AttentionLayout, AttentionSlice, slices

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_attention(query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """[1, heads, queries, d], keys and values of all tokens and maybe fewer heads -> [1, heads, queries, d]."""
    if query.device.type == "cpu":
        return _Sliced.apply(query, key, value, slices(layout), scale)
    return (magi.sliced_flash if magi.fits(query) else flexible)(query, key, value, layout, scale)


class _Sliced(torch.autograd.Function):
    """softmax(q k^T) v over slices. The backward pass gives each slice the whole row's output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: tuple[AttentionSlice, ...], scale: float
    ) -> Tensor:
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


def _of(part: AttentionSlice, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, tuple[int, int]]]:
    return [(query, part.queries), (key, part.keys), (value, part.keys)]
