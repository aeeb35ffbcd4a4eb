"""Megatron's way of tokens to experts and back, for a rank that holds all experts: one permutation, no communication.

megatron-core 0.16.1's own dispatcher waits for the GPU four times a layer, as it selects tokens by a mask and counts
them on the CPU, and it cuts the tokens by expert and joins them in the same order. Left out: dropped tokens, shared
experts, ranks that divide experts or tokens (`MoEAlltoAllTokenDispatcher`).
"""

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class LocalDispatcher(MoEAlltoAllTokenDispatcher):
    """Sorts tokens by expert; each comes once for each of its experts."""

    def dispatch_preprocess(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """[..., hidden], [N, experts] whether chosen, [N, experts] -> the sorted tokens and their weights."""
        self.hidden_shape, self.routing_map = hidden.shape, chosen
        hidden = hidden.reshape(-1, hidden.shape[-1])
        self.hidden_shape_before_permute = hidden.shape
        count = len(chosen) * self.config.moe_router_topk
        places = torch.nonzero_static(chosen.T.flatten(), size=count)[:, 0]
        self.tokens_per_expert = chosen.sum(dim=0)
        self.reversed_local_input_permutation_mapping = places % len(chosen)
        sorted_weights = weights.T.flatten().index_select(0, places)
        return hidden.index_select(0, self.reversed_local_input_permutation_mapping), sorted_weights

    def token_dispatch(self, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Nothing is sent."""
        return hidden, weights

    def dispatch_postprocess(self, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens, how many each expert has, and their weights."""
        return hidden, self.tokens_per_expert, weights

    def combine_preprocess(self, hidden: Tensor) -> Tensor:
        """The tokens are in the order in which they were sorted."""
        return hidden

    def token_combine(self, hidden: Tensor, *_: bool) -> Tensor:
        """Nothing is sent."""
        return hidden
