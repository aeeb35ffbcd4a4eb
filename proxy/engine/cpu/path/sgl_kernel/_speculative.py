"""Speculative decoding with a single chain of draft tokens (top-k 1) and greedy verification."""

import torch


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """Take the last accepted token of each request; requests are `accept_stride` apart in `accept_tokens`."""
    flat = accept_tokens.flatten()
    for i, count in enumerate(accept_lens.tolist()):
        bonus_tokens[i] = flat[accept_stride * i + count - 1].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Collect the cache slots of the accepted tokens; -1 marks a rejected one."""
    index = accept_index[accept_index > -1]
    accept_out_cache_loc[: index.numel()] = out_cache_loc[index].to(accept_out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """Return the slots of each request's positions: [requests, positions]."""
    assert topk == 1, f"the CPU stand-in for sgl_kernel drafts a single chain: top-k {topk}"
    return req_to_token[req_pool_indices]


def build_tree_kernel_efficient_cpu(
    parent_list, selected_index, verified_seq_len, tree_mask, positions, retrive_index,
    retrive_next_token, retrive_next_sibling, topk, depth, draft_token_num, tree_mask_mode,
):  # fmt: skip
    """Describe one chain of draft tokens per request as SGLang's tree: each token's position, index and successor.

    The last one's successor is -1, and no token of a chain has a sibling. `tree_mask` stays as it is: attention is
    causal here, as a chain's mask would be (_attention.py).
    """
    assert topk == 1, f"the CPU stand-in for sgl_kernel drafts a single chain: top-k {topk}"
    batch, count = verified_seq_len.numel(), draft_token_num
    steps = torch.arange(count)
    positions.view(batch, count).copy_((verified_seq_len.view(-1, 1) + steps).to(positions.dtype))
    index = torch.arange(batch).view(-1, 1) * count + steps
    retrive_index.view(batch, count).copy_(index.to(retrive_index.dtype))
    following = steps + 1
    following[-1] = -1
    retrive_next_token.view(batch, count).copy_(following.expand(batch, count).to(retrive_next_token.dtype))
    retrive_next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling,
    target_predict,
):  # fmt: skip
    """Accept draft tokens of each request while they equal the target model's, which adds the token after them."""
    target = target_predict.flatten()
    for b in range(candidates.shape[0]):
        last = int(retrive_index[b, 0])
        accept_index[b, 0] = last
        accepted, draft = 0, int(retrive_next_token[b, 0])
        while draft != -1 and accepted + 1 < accept_index.shape[1]:
            if int(candidates[b, draft]) != int(target[last]):
                break
            predicts[last] = target[last]
            accepted += 1
            last = int(retrive_index[b, draft])
            accept_index[b, accepted] = last
            draft = int(retrive_next_token[b, draft])
        accept_token_num[b] = accepted
        predicts[last] = target[last]
