"""Attention over prefix trees, as Megatron's `core_attention`.

A micro-batch is one row of N tokens that holds trees in depth-first pre-order; a token attends to itself and to its
ancestors. The runs of the layout are handed through `attention_bias`, which Megatron passes to the core attention
untouched, also through activation recomputation. Which kernel computes it is trainer/megatron/kernels.py's matter.
Left out: context parallelism, attention dropout.
"""

import math
from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor

from trainer.megatron.kernels import tree_attention
from trainer.tree import Run


class TreeAttention(MegatronModule):
    """Each token attends to its ancestors and itself."""

    def __init__(self, config: TransformerConfig, layer_number: int, **options: Any):
        super().__init__(config=config)
        groups = options.get("pg_collection")
        tensor_parallel = groups.tp.size() if groups is not None else config.tensor_model_parallel_size
        self.width = divide(config.kv_channels * config.num_attention_heads, tensor_parallel)
        self.scale = options.get("softmax_scale") or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attention_bias: Sequence[Run],
        **_: Any,
    ) -> Tensor:
        """[N, 1, heads, d] each -> [N, 1, heads * d]."""
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        output = tree_attention(heads[0], heads[1], heads[2], attention_bias, self.scale)
        return output.permute(2, 0, 1, 3).reshape(query.shape[0], 1, self.width)
