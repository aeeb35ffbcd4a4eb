"""The load-balancing loss of experts: one for each sequence, so that trees, micro-batches and ranks leave it as it is.

DeepSeek-V3 (arXiv 2412.19437), equations 17 to 20, with the softmax of Qwen3's router as scores: for a sequence of T
tokens, k of E experts each, sum_i f_i P_i where f_i = E / (k T) * (how often expert i was chosen) and P_i is the mean
of its probabilities. It is 1 when all experts are used alike. A statistic over micro-batches or ranks, as Switch's loss
has it, would depend on what is computed together. Left out: balance over the whole batch, biases of experts.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.micro_batch import SequencePaths


def imbalance(
    probabilities: Tensor, chosen: Tensor, paths: SequencePaths, group: dist.ProcessGroup | None = None
) -> Tensor:
    """sum_r weight_r sum_i f_ri P_ri over the sequences r that pass through these tokens; each branch has its own.

    `probabilities` [N, E] of all experts, `chosen` [N, k] indices, `paths` of the same N tokens. Where the ranks of
    `group` have parts of the tokens, each returns its part of the sum. The gradient goes through the probabilities.
    """
    experts, (count, width) = probabilities.shape[1], (len(paths.lengths), chosen.shape[1])
    used = _bins(paths.first, chosen, count, experts) - _bins(paths.end, chosen, count, experts)
    used = used.cumsum(0)[:count]  # [sequences, E]: from where tokens join and leave a sequence to what it holds
    if group is not None and group.size() > 1:
        dist.all_reduce(used, group=group)
    each = used * (paths.weights * experts / (width * paths.lengths**2))[:, None]
    before = torch.cat((each.new_zeros(1, experts), each.cumsum(0)))  # in double precision: differences lose nothing
    factors = before[paths.end] - before[paths.first]
    return (factors.to(probabilities.dtype) * probabilities).sum()


def _bins(sequences: Tensor, chosen: Tensor, count: int, experts: int) -> Tensor:
    """[count + 1, experts] how many tokens of each sequence number chose each expert."""
    places = sequences[:, None] * experts + chosen
    found = places.new_zeros((count + 1) * experts)  # bincount would have a GPU wait to learn its own size
    return found.index_add_(0, places.flatten(), torch.ones_like(places.flatten())).view(count + 1, experts)
