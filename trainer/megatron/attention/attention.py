"""Attention over prefix trees, as Megatron's `core_attention`.

A micro-batch is one row of N tokens that holds trees in depth-first pre-order; a token attends to itself and to its
ancestors. The layout is handed through `attention_bias`, which Megatron passes to the core attention untouched, also
through activation recomputation. Where ranks share a micro-batch, each has the queries of its stretch and gathers the
keys and values of all. Which kernel computes it is trainer/megatron/attention/kernels.py's matter. Left out: attention
dropout.
"""

import math
from typing import Any

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor

from trainer.megatron.attention.kernels import AttentionLayout, tree_attention


class TreeAttention(MegatronModule):
    """Each token attends to its ancestors and itself."""

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
        """[N, 1, heads, d] each -> [N, 1, heads * d]."""
        if self.context is not None:  # in the backward pass the gradients of all ranks are summed and divided again
            key, value = (
                gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=True, group=self.context)
                for part in (key, value)
            )
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        output = tree_attention(heads[0], heads[1], heads[2], attention_bias, self.scale)
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], 1, self.width)
