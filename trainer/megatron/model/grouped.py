"""The experts of one rank: Megatron's one after the other, or all in one grouped matrix product where that is faster.

Both compute from the same parameters, one weight per expert and layer, so checkpoints and exports do not depend on it.
The grouped product stacks the weights first, a copy that costs little beside the product itself. Left out: fp8.
"""

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from trainer.data.to_device import to_device


class LocalExperts(SequentialMLP):
    """Experts for tokens that are sorted by expert."""

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """[tokens, hidden] -> [tokens, hidden] weighted, and no bias.

        `tokens_per_expert` [experts]; `weights` [tokens] are the router's.
        """
        if hidden.device.type != "cpu" and hidden.dtype == torch.bfloat16:  # all that torch's grouped product supports
            return self.grouped(hidden, tokens_per_expert, weights), None
        output, _ = super().forward(hidden, tokens_per_expert, weights)
        return output, None

    def grouped(self, hidden: Tensor, tokens_per_expert: Tensor, weights: Tensor) -> Tensor:
        """The same by two grouped products over the tokens of all experts."""
        ends = tokens_per_expert.cumsum(0).int()
        if ends.device != hidden.device:  # Megatron counts on the CPU what expert ranks exchange
            ends = to_device(ends.numpy(), hidden.device)
        matrices = [(expert.linear_fc1.weight, expert.linear_fc2.weight) for expert in self.local_experts]
        into, out = (list(stack) for stack in zip(*matrices, strict=True))
        inner = self.activation(_grouped_product(hidden, into, ends), weights[:, None])
        return _grouped_product(inner, out, ends)

    def activation(self, product: Tensor, weights: Tensor) -> Tensor:
        """SwiGLU of [tokens, 2 * ffn], times the weights, [tokens, 1], in the dtype of the product: [tokens, ffn]."""
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(product, None, weights)
        gate, up = product.chunk(2, dim=-1)
        return (F.silu(gate) * up * weights).to(product.dtype)


def _grouped_product(hidden: Tensor, matrices: list[Tensor], ends: Tensor) -> Tensor:
    """hidden[ends[i - 1]:ends[i]] @ matrices[i].T for each i.

    The stacked matrices are not kept for the backward pass, but stacked again there: over all layers, they would take
    as much memory as the experts.
    """
    stacked = torch.stack(matrices).transpose(1, 2)
    storage = stacked.untyped_storage()._cdata

    def pack(saved: Tensor) -> Tensor | None:
        return None if saved.untyped_storage()._cdata == storage else saved

    def unpack(saved: Tensor | None) -> Tensor:
        return torch.stack(matrices).transpose(1, 2) if saved is None else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return F.grouped_mm(hidden, stacked, offs=ends)
