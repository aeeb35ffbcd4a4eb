"""The experts of one rank: Megatron's one after the other, or all in one grouped matrix product where that is faster.

Both compute from the same parameters, one weight per expert and layer, so checkpoints and exports do not depend on it.
The grouped product stacks the weights first, a copy that costs little beside the product itself. Left out: fp8.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class LocalExperts(SequentialMLP):
    """Experts for tokens that are sorted by expert."""

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """[tokens, hidden] -> [tokens, hidden] weighted, and no bias.

        `tokens_per_expert` [experts]; `weights` [tokens] are the router's.
        """
        if hidden.device.type == "cuda" and hidden.dtype == torch.bfloat16:  # all that torch's grouped product supports
            return self.grouped(hidden, tokens_per_expert, weights), None
        output, _ = super().forward(hidden, tokens_per_expert, weights)
        return output, None

    def grouped(self, hidden: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> Tensor:
        """The same by two grouped products over the tokens of all experts."""
        ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32)
        matrices = [(expert.linear_fc1.weight, expert.linear_fc2.weight) for expert in self.local_experts]
        into, out = (torch.stack(list(stack)).transpose(1, 2) for stack in zip(*matrices, strict=True))
        gate, up = F.grouped_mm(hidden, into, offs=ends).chunk(2, dim=-1)
        inner = (F.silu(gate) * up * weights[:, None]).to(hidden.dtype)
        return F.grouped_mm(inner, out, offs=ends)
