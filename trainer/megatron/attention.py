"""Attention over packed sequences, as Megatron's `core_attention`.

A micro-batch is one row of S tokens holding sequences end to end; a token attends to the earlier tokens of its own
sequence. Each sequence is one causal SDPA call, so no masked block is computed and no mask is built. Left out: context
parallelism, attention dropout, branching sequences.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor


class PackedAttention(MegatronModule):
    """Causal attention within each sequence.

    `attention_bias` carries the sequence lengths: Megatron hands that argument to the core attention untouched, also
    through activation recomputation.
    """

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
        attention_bias: Sequence[int],
        **_: Any,
    ) -> Tensor:
        """[S, 1, heads, d] each -> [S, 1, heads * d]."""
        lengths = list(attention_bias)
        # split, not slices: the gradient of a split is one concatenation, that of k slices is k full-size additions
        parts = [tensor.permute(1, 2, 0, 3).split(lengths, dim=2) for tensor in (query, key, value)]
        grouped = query.shape[2] != key.shape[2]
        outputs = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
            for q, k, v in zip(*parts, strict=True)
        ]
        return torch.cat(outputs, dim=2).permute(2, 0, 1, 3).reshape(query.shape[0], 1, self.width)
