"""Attention over prefix trees, in the place of Megatron's `core_attention` (softmax(q k^T) v, without projections).

A micro-batch is one sequence of N tokens that holds several trees in depth-first pre-order; a token attends to itself
and to its ancestors. The layout of the trees arrives as `attention_bias`: megatron-core 0.16.1 passes that argument
from the model through every layer to the core attention without looking at it, also when activations are recomputed.
Where context ranks share a micro-batch, each has the queries of its stretch and gathers the keys and values of all.
Left out: the kernels (trainer/megatron/attention/kernels.py); attention dropout.
"""

import math
from typing import Any

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor

from trainer.megatron.attention.kernels import tree_attention
from trainer.megatron.attention.layout import AttentionLayout


class TreeAttention(MegatronModule):
    """Each token attends to itself and its ancestors.

    Takes the arguments that Megatron gives any core attention. megatron-core 0.16.1's own refuses context parallelism
    without Transformer Engine, and knows no trees.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **options: Any):
        super().__init__(config=config)
        groups = options.get("pg_collection")
        tensor_parallel = groups.tp.size() if groups is not None else config.tensor_model_parallel_size
        self.context = groups.cp if groups is not None and config.context_parallel_size > 1 else None
        self.width = divide(config.kv_channels * config.num_attention_heads, tensor_parallel)
        self.scale = options.get("softmax_scale") or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attention_bias: AttentionLayout,
        **_: Any,
    ) -> Tensor:
        """[queries, 1, heads, d] and keys and values of the same tokens -> [queries, 1, heads * d].

        Heads of keys and values may be fewer than those of queries (grouped-query attention).
        """
        if self.context is not None:
            # tensor_parallel_output_grad: the backward pass sums the ranks' gradients and gives each rank its part
            key, value = (
                gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=True, group=self.context)
                for part in (key, value)
            )
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        output = tree_attention(heads[0], heads[1], heads[2], attention_bias, self.scale)
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], 1, self.width)
