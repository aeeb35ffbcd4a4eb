"""The kernels of tree attention behind one function. None of them builds an N x N mask.

CPU: the layout's slices. A run's queries against its own keys are one causal call; the queries of the rest of its
subtree against its keys are one full call; both are over contiguous ranges. Partial results are combined by their
log-sum-exp, as flash attention combines its blocks. GPU: MagiAttention over the same slices where it is installed and
supports the heads (trainer/megatron/attention/magi.py), else FlexAttention (trainer/megatron/attention/flex.py), whose
backward pass torch has for GPUs only. Left out: dropout, sliding windows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.megatron.attention import magi
from trainer.megatron.attention.flex import flexible
from trainer.megatron.attention.layout import AttentionLayout, AttentionSlice, slices

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tree_attention(query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """[1, heads, queries, d], [1, key heads, keys, d] twice -> [1, heads, queries, d].

    Keys are all tokens of the layout. `scale` multiplies the scores q k^T before the softmax.
    """
    return kernel_for(query)(query, key, value, layout, scale)


def kernel_for(query: Tensor) -> Callable[..., Tensor]:
    """The function that attends for queries of this device, type and head dimension."""
    if query.device.type == "cpu":
        return sliced
    return magi.sliced_flash if magi.fits(query) else flexible


def sliced(query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """The CPU's kernel; arguments and result as those of `tree_attention`."""
    result: Tensor = _Sliced.apply(query, key, value, slices(layout), scale)
    return result


class _Sliced(torch.autograd.Function):
    """softmax(q k^T) v over slices.

    The backward pass gives the kernel each slice with the output and log-sum-exp of the whole row; then the gradients
    of the slices add up to that of the whole.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: tuple[AttentionSlice, ...], scale: float
    ) -> Tensor:
        # In half precision, the rounding errors of many joins would add up.
        wide = torch.promote_types(query.dtype, torch.float32)
        output, total = torch.empty_like(query, dtype=wide), query.new_empty(query.shape[:3], dtype=wide)
        for part in parts:
            q, k, v = (tensor[:, :, slice(*at)] for tensor, at in _with_ranges(part, query, key, value))
            partial, sums = _forward(q, k, v, 0.0, part.causal, scale=scale)
            rows = slice(*part.queries)
            if part.causal:
                output[:, :, rows], total[:, :, rows] = partial, sums
            else:
                before = total[:, :, rows]
                joined = torch.logaddexp(before, sums)
                old_share, new_share = (before - joined).exp_()[..., None], (sums - joined).exp_()[..., None]
                output[:, :, rows] = output[:, :, rows] * old_share + partial * new_share
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
            q, k, v = (tensor[:, :, slice(*at)] for tensor, at in _with_ranges(part, query, key, value))
            rows = slice(*part.queries)
            gradients_of_slice = _backward(
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
            for into, (_, at), gradient in zip(
                summed, _with_ranges(part, query, key, value), gradients_of_slice, strict=True
            ):
                into[:, :, slice(*at)] += gradient
        return (*(gradient.to(query.dtype) for gradient in summed), None, None)


def _with_ranges(
    part: AttentionSlice, query: Tensor, key: Tensor, value: Tensor
) -> list[tuple[Tensor, tuple[int, int]]]:
    """Each tensor with the range of its tokens that the slice covers."""
    return [(query, part.queries), (key, part.keys), (value, part.keys)]
