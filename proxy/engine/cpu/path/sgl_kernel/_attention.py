"""Attention of SGLang's `intel_amx` backend in plain torch, for speculative decoding.

Sequences are computed one at a time. Caches are [slots, KV heads, head size]; `req_to_token[row, position]` is a slot.
"""

import torch


def _attend(q, keys, values, out, locations, offset, scaling):
    """Write causal attention of positions [offset, offset + n) of one sequence; q and out: [n, heads, head size]."""
    k, v = keys[locations].movedim(0, 1), values[locations].movedim(0, 1)
    groups = q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    rows, length = q.shape[0], locations.numel()
    mask = torch.arange(length).view(1, -1) <= (torch.arange(rows).view(-1, 1) + offset)
    query = q.movedim(0, 1).unsqueeze(0).to(k.dtype)
    result = torch.nn.functional.scaled_dot_product_attention(
        query, k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, scale=scaling
    )
    out.copy_(result[0].movedim(1, 0).to(out.dtype))


def decode(q, keys, values, k_scale, v_scale, out, k, v, loc, logits, req_to_token, rows, seq_lens, scaling, *unused):
    """Attend with one new token per sequence, storing its key and value first; q: [sequences, heads, head size]."""
    if k is not None:
        keys[loc] = k.view(-1, *keys.shape[1:]).to(keys.dtype)
        values[loc] = v.view(-1, *values.shape[1:]).to(values.dtype)
    out = out.view(q.shape[0], q.shape[1], -1)
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length].long()
        _attend(q[i : i + 1], keys, values, out[i : i + 1], slots, length - 1, scaling)


def extend(
    q, k, v, out, keys, values, k_scale, v_scale, req_to_token, rows, seq_lens, extend_lens, extend_start, max_extend,
    scaling, cap, cross, window, encoder, sinks, tree_mask, causal,
):  # fmt: skip
    """Attend with the last `extend_lens[i]` tokens of each sequence, whose keys and values are cached already."""
    assert tree_mask is None and causal, "the CPU stand-in for sgl_kernel attends causally only (top-k 1)"
    spans = zip(rows.tolist(), seq_lens.tolist(), extend_lens.tolist(), extend_start.tolist(), strict=True)
    for row, length, count, start in spans:
        slots = req_to_token[row, :length].long()
        _attend(q[start : start + count], keys, values, out[start : start + count], slots, length - count, scaling)
