"""Megatron's GPTModel, built from the config.json of a Hugging Face model directory, on prefix trees.

Families: dense Qwen3, Qwen2, MiMo and Llama (also with Llama-3 rope scaling), tied or untied embeddings; Qwen3-MoE
(trainer/megatron/model/experts.py). Left out: sliding windows, biases outside q/k/v.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainer.config import Parallel
from trainer.config.model_shape import ModelShape, demand_splits
from trainer.data.micro_batch import MicroBatch
from trainer.megatron.attention.attention import TreeAttention
from trainer.megatron.attention.layout import AttentionLayout
from trainer.megatron.device import has_gpu
from trainer.megatron.model import transformer_engine
from trainer.megatron.model.experts import expert_options, mark_experts, with_experts
from trainer.megatron.parallel import whole_vocabulary
from trainer.megatron.replay import ReplayCounter, RoutingReplay

LOGITS_TOKENS = 4096
"""Maximum rows of logits in memory at once; beyond it the head is computed again in the backward pass. With a
vocabulary of 150,000 these are 2.5 GB in fp32, and the head's matrix products are large enough to be efficient."""


def transformer_config(shape: ModelShape, dtype: torch.dtype, parallel: Parallel) -> TransformerConfig:
    """Megatron's config for a model of this shape. Raises UserError when heads, vocabulary or layers do not split.

    Of the fusions of megatron-core 0.16.1, only that of the activation is on, and only on a GPU: there it keeps none of
    the intermediate results of SwiGLU, which are most of the memory of a long path. The others are off, so that CPU and
    GPU run the same operations; those of gradient accumulation and RoPE also need apex or Transformer Engine.
    """
    demand_splits(shape, parallel)
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        # Needed here as well as in the layer spec: without it, megatron-core 0.16.1 does not sum the gradients of the
        # q/k norms over tensor ranks.
        qk_layernorm=shape.family in ("qwen3", "qwen3_moe"),
        add_qkv_bias=shape.family in ("qwen2", "mimo"),
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The weights are loaded afterwards. Not `perform_initialization=False`: with that, megatron-core 0.16.1 also
        # leaves out its marks of parameters that tensor ranks divide.
        init_method=leave,
        output_layer_init_method=leave,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence,
        context_parallel_size=parallel.context,
        pipeline_model_parallel_size=parallel.pipeline,
        pipeline_dtype=dtype,
        variable_seq_lengths=parallel.pipeline > 1,  # micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # for ranks with different numbers of tokens; pipelines require it
        batch_p2p_sync=False,  # True makes 0.16.1 wait for the GPU after each transfer between stages
        recompute_granularity="full" if parallel.recompute else None,
        recompute_method="uniform" if parallel.recompute else None,
        recompute_num_layers=1 if parallel.recompute else None,
        calculate_per_token_loss=True,  # sum gradients over ranks, do not average: the loss's scales are of the batch
        bias_dropout_fusion=False,
        bias_activation_fusion=has_gpu(),
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        **expert_options(shape, parallel),
    )


def leave(weight: Tensor) -> None:
    """Leave a new parameter as it is. Drawing the weights of a large model would take minutes."""


def build_model(shape: ModelShape, config: TransformerConfig, parallel: Parallel) -> "PolicyModel":
    """A model of this shape with uninitialised weights, or this pipeline rank's stage of one."""
    layers_per_stage = shape.layers // parallel.pipeline
    first = layers_per_stage * parallel_state.get_pipeline_model_parallel_rank()
    model = PolicyModel(
        config,
        TransformerBlockSubmodules(
            layer_specs=layer_specs(shape, config)[first : first + layers_per_stage], layer_norm=SharedNorm
        ),
        vocab_size=shape.vocab,
        max_sequence_length=shape.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
    )
    mark_experts(model)
    model.rotary_pos_emb = PackedRotary(shape, model.rotary_pos_emb.cp_group)
    model.logits_tokens, model.head_float32 = LOGITS_TOKENS, parallel.head_float32
    if config.sequence_parallel and model.post_process:
        # In the layers, each tensor rank has a part of the tokens. The LM head needs the tokens with a loss, wherever
        # they are; so `_postprocess` gathers all tokens itself, and the output layer must not gather them again.
        model.output_layer.sequence_parallel = False
        model.output_layer.allreduce_dgrad = True
    return model


def layer_specs(shape: ModelShape, config: TransformerConfig) -> list[ModuleSpec]:
    """Megatron's spec (which modules a layer consists of) for each layer of the model, over all stages."""
    dense = (
        _with_tree_attention(transformer_engine.engine_spec(config.qk_layernorm), config)
        if transformer_engine.available()
        else _layer_spec(config)
    )
    if shape.experts is None:
        return [dense] * shape.layers
    sparse = with_experts(_layer_spec(config), shape.experts)
    return [sparse if has_experts else dense for has_experts in shape.experts.layers]


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    """A layer of Megatron's plain modules, with norms that allow sequence parallelism."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SharedNorm
    return _with_tree_attention(spec, config)


def _with_tree_attention(spec: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """Put tree attention into a layer's spec, and norms for q and k that allow sequence parallelism."""
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=TreeAttention)
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = SharedNorm
    return spec


class SharedNorm(torch.nn.Module):
    """RMSNorm that also works where tensor ranks divide the tokens (sequence parallelism).

    megatron-core 0.16.1 refuses sequence parallelism with torch's norms. The parameter's mark `sequence_parallel` makes
    Megatron sum its gradient over the tensor ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class PolicyModel(GPTModel):
    """GPTModel on prefix trees. Computes logits only for tokens whose logprob is asked for, some at a time."""

    logits_tokens: int
    """Tokens whose logits exist at the same time: bounds the memory of the LM head."""
    head_float32: bool
    """Whether the LM head computes in fp32."""
    balance: float = 0.0
    """Coefficient of the load-balancing loss of experts, per trained token and layer."""
    replay_counter: ReplayCounter | None = None
    """Set: recorded experts are replayed, and counted here. None: routers choose."""

    def forward(self, packed: MicroBatch) -> Tensor:
        """[edges] the logprob of each of `packed.labels`, in fp32.

        On a stage before the last one: the hidden states for the next stage, [N, 1, hidden].
        """
        output = self._run(packed, packed.labels)
        return -output[0] if self.post_process else output

    def logits(self, packed: MicroBatch) -> Tensor:
        """[edges, vocabulary of this tensor rank]. On a stage before the last one: as `forward`."""
        output = self._run(packed, None)
        return output[0] if self.post_process else output

    def best(self, packed: MicroBatch) -> Tensor:
        """[edges] the likeliest token of the whole vocabulary. On a stage before the last one: as `forward`."""
        return self._run(packed, None, self._likeliest)

    def _run(
        self, packed: MicroBatch, labels: Tensor | None, compute: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Run the layers, then `_postprocess`.

        megatron-core 0.16.1's GPTModel.forward takes no other arguments for `_postprocess`, so `loss_mask`, which it
        hands on unread, carries the tokens whose logits are asked for and what to compute of them.
        """
        self.rotary_pos_emb.positions = packed.positions
        return super().forward(
            packed.tokens[None],
            packed.positions[None],
            attention_mask=None,
            labels=None if labels is None else labels[None],
            loss_mask=(packed.rows, compute),
            extra_block_kwargs={"attention_bias": self._layout(packed)},
        )

    def _layout(self, packed: MicroBatch) -> AttentionLayout:
        """The trees of a micro-batch as the layers take them, with the balance loss's weights and the replay."""
        paths = replay = None
        if self.balance and packed.paths is not None:
            paths = replace(packed.paths, weights=packed.paths.weights * self.balance)
        if self.replay_counter is not None and packed.experts is not None:
            replay = RoutingReplay(packed.experts, self.replay_counter)
        return AttentionLayout(packed.runs, packed.queries, paths, replay)

    def _postprocess(
        self, hidden_states: Tensor, *_: Any, labels: Tensor | None, loss_mask: tuple[Tensor, Any], **__: Any
    ) -> Tensor:
        """Hidden states -> [1, edges] negative logprobs of the labels, logits, or the result of `compute`."""
        if not self.post_process:
            return hidden_states
        rows, compute = loss_mask  # see `_run`
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        selected = hidden_states.index_select(0, rows)
        if compute is not None:
            return compute(selected)
        if labels is None:
            return self._logits(selected).transpose(0, 1).contiguous()
        parts = list(zip(selected.split(self.logits_tokens), labels.split(self.logits_tokens, dim=1), strict=True))
        if len(parts) == 1:
            return self._losses(*parts[0], self._head_weight())
        # Recompute the logits of each part in the backward pass, so that only one part's exist at a time. The parts'
        # gradients of the head add up in the dtype of the weight that they share, so they share one in fp32.
        weight = self._head_weight()
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        losses = [checkpoint(self._losses, *part, weight, use_reentrant=False) for part in parts]
        return torch.cat(losses, dim=1)

    def _likeliest(self, hidden: Tensor) -> Tensor:
        """[edges, 1, hidden] -> [edges] tokens. Gathers the vocabulary over tensor ranks."""
        parts = [whole_vocabulary(self._logits(part)).argmax(-1) for part in hidden.split(self.logits_tokens)]
        return torch.cat(parts).view(-1)

    def _losses(self, hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """[part, 1, hidden], [1, part] labels, the head's weight -> [1, part] negative logprobs.

        Megatron's cross entropy: each tensor rank computes its part of the vocabulary.
        """
        return self.compute_language_model_loss(labels, self._project(hidden, weight))

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._project(hidden, self._head_weight())

    def frozen_logits(self, hidden: Tensor) -> Tensor:
        """[edges, 1, hidden] -> [edges, 1, vocabulary of this tensor rank].

        The gradient reaches `hidden`, but not the LM head.
        """
        return self._project(hidden, self._head_weight().detach())

    def _head_weight(self) -> Tensor:
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def _project(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if self.head_float32:
            hidden, weight = hidden.float(), weight.float()
        return self.output_layer(hidden, weight=weight.to(hidden.dtype))[0]


class PackedRotary(RotaryEmbedding):
    """RoPE by explicit positions.

    megatron-core 0.16.1's own counts positions 0..S-1 along the sequence, but a packed token's position is its depth in
    its tree.
    """

    positions: Tensor
    inv_freq: Tensor

    def __init__(self, shape: ModelShape, cp_group: Any):
        super().__init__(
            shape.head_dim,
            1.0,
            rotary_base=shape.rope["rope_theta"],
            use_cpu_initialization=True,
            cp_group=cp_group,
        )
        if shape.rope.get("rope_type", shape.rope.get("type")) == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            self.inv_freq = self._apply_scaling(self.inv_freq, **{name: shape.rope[name] for name in names})

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        """[S, 1, 1, head_dim] angles of `positions`, which the model sets before each pass. The argument is ignored."""
        self.inv_freq = self.inv_freq.to(self.positions.device, non_blocking=True)
        angles = torch.outer(self.positions.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
