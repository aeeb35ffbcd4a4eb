"""Bookkeeping of KV-cache slots: which rows of the cache belong to which position of which request."""

import ctypes


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Assign the slots in `out_cache_loc`, in order, to positions [start, end) of each request."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[done : done + count].to(req_to_token.dtype)
        done += count


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Collect the slots of positions [start, end) of each request, in order, in `out_cache_loc`."""
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        count = end - start
        out_cache_loc[done : done + count] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        done += count


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """Collect the slots of the `topk * num_steps` positions behind each request in `out_cache_loc`."""
    count = topk * num_steps
    for i, (row, start) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        out_cache_loc[i * count : (i + 1) * count] = req_to_token[row, start : start + count].to(out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Copy cache rows `src_loc` to `tgt_loc` in every layer, reading all before writing; `strides`: bytes per row."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + i * stride, stride) for i in sources]
        for i, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + i * stride, row, stride)
