"""The load-balancing loss of experts, taken for each sequence, so that it is the same for any packing or split.

DeepSeek-V3 (arXiv 2412.19437), equations 17 to 20, with the softmax of Qwen3's router as scores. For a sequence of T
tokens, each of which goes to k of E experts, it is sum_i f_i P_i: f_i = E / (k T) * (how often expert i was chosen),
and P_i is the mean of its probabilities. It is 1 when all experts are used equally. Switch's loss takes statistics over
micro-batches or ranks and would depend on what is computed together. Left out: balance over the whole batch, expert
biases.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.micro_batch import SequencePaths


def imbalance(
    probabilities: Tensor, chosen: Tensor, paths: SequencePaths, group: dist.ProcessGroup | None = None
) -> Tensor:
    """sum_r weight_r sum_i f_ri P_ri over the sequences r that pass through these tokens.

    Each branch of a tree is its own sequence. `probabilities` [N, E] of all experts; `chosen` [N, k] indices; `paths`
    of the same N tokens. The gradient goes through the probabilities. Where the ranks of `group` have parts of the
    tokens, each returns its part of the sum. Collective over `group`.
    """
    experts, (count, width) = probabilities.shape[1], (len(paths.lengths), chosen.shape[1])
    used = _bins(paths.first, chosen, count, experts) - _bins(paths.end, chosen, count, experts)
    used = used.cumsum(0)[:count]  # [sequences, E] counts: a token counts from its first sequence to its last
    if group is not None and group.size() > 1:
        dist.all_reduce(used, group=group)
    each = used * (paths.weights * experts / (width * paths.lengths**2))[:, None]
    before = torch.cat(
        (each.new_zeros(1, experts), each.cumsum(0))
    )  # float64, as differences of cumulative sums lose digits
    factors = before[paths.end] - before[paths.first]
    return (factors.to(probabilities.dtype) * probabilities).sum()


def _bins(sequences: Tensor, chosen: Tensor, count: int, experts: int) -> Tensor:
    """[count + 1, experts] how many of the tokens with each sequence number chose each expert."""
    places = sequences[:, None] * experts + chosen
    counts = places.new_zeros((count + 1) * experts)  # not bincount: a GPU would wait for its result's size
    return counts.index_add_(0, places.flatten(), torch.ones_like(places.flatten())).view(count + 1, experts)
