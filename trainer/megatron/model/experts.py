"""Mixture of experts: Megatron's MoE layer without dropped tokens, behind a router that knows the prefix trees.

Every expert is whole on one rank (experts are not split over tensor ranks); `parallel.expert` ranks divide the experts
among them and send each other the tokens. A token's experts depend on its hidden state alone, so a token that branches
share is routed once for all of them. The choice is a step function: where two experts have almost equal scores, the
rounding of another packing may choose the other one.
Left out: capacities, shared experts, expert biases.
"""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_default_pg_collection,
    router_gating_linear,
)
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from trainer.config import Parallel
from trainer.config.model_shape import ExpertShape, ModelShape
from trainer.data.micro_batch import SequencePaths
from trainer.megatron.attention.layout import AttentionLayout
from trainer.megatron.model.balance import imbalance
from trainer.megatron.model.grouped import LocalExperts
from trainer.megatron.model.local_dispatch import LocalDispatcher

# megatron-core 0.16.1 uses this name without defining it when Transformer Engine is absent (NameError in the router).
vars(moe_utils).setdefault("te_general_gemm", None)


def expert_options(shape: ModelShape, parallel: Parallel) -> dict[str, Any]:
    """The fields of Megatron's TransformerConfig about experts. Empty for a dense model."""
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(sparse) for sparse in experts.layers],
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": 1,
    }


def with_experts(spec: ModuleSpec, experts: ExpertShape) -> ModuleSpec:
    """Replace the MLP in a layer's spec by experts. Changes `spec` and returns it."""
    mixture = get_moe_module_spec_for_backend(LocalSpecProvider(), experts.count)
    mixture.submodules.router = TreeRouter
    mixture.submodules.experts.module = LocalExperts
    spec.submodules.mlp = mixture
    spec.module = MixtureLayer
    return spec


def mark_experts(model: torch.nn.Module) -> None:
    """Make Megatron sum the gradients of experts over the ranks that hold copies of them.

    megatron-core 0.16.1 does so only where there is more than one expert rank. But experts are not split over tensor
    ranks here, so these too hold copies that see different tokens. And the optimizer's state in a checkpoint then has
    the same parts for every split. `allreduce = False` is Megatron's mark for "not with the dense parameters".
    """
    for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
        for weight in layer.experts.parameters():
            vars(weight)["allreduce"] = False


class TreeRouter(Router):
    """Chooses the experts of each token and their weights: a softmax over all experts, of which the largest are kept.

    Scores and softmax are in fp32 or better. `MixtureLayer` sets `layout` before each pass.
    """

    layout: AttentionLayout

    def forward(self, hidden: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[N, 1, hidden] -> [N, experts] weights, zero where not chosen, and [N, experts] whether chosen."""
        scores = self.gating(hidden).view(-1, self.num_experts)
        weights, chosen = self.routing(scores)
        paths = self.layout.paths
        if paths is not None and torch.is_grad_enabled():
            # Layers that are recomputed run twice, first without gradients; the loss counts once.
            # The scaler adds the loss's gradient in the backward pass and returns the weights unchanged.
            weights = MoEAuxLossAutoScaler.apply(weights, self.imbalance(scores, chosen, paths))
        return weights, torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)

    def gating(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., experts] scores."""
        return router_gating_linear(hidden, self.weight, None, torch.promote_types(hidden.dtype, torch.float32))

    def routing(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[N, experts] scores -> [N, experts] weights and [N, experts per token] indices of the chosen experts."""
        chosen = self.choose(logits)
        if self.config.moe_router_pre_softmax:
            top = logits.softmax(dim=-1).gather(1, chosen)
        else:  # a softmax over the chosen ones equals the full softmax divided by their sum
            top = logits.gather(1, chosen).softmax(dim=-1)
        return torch.zeros_like(logits).scatter(1, chosen, top), chosen

    def choose(self, logits: Tensor) -> Tensor:
        """[N, experts per token] indices of the experts that each token goes to: recorded ones where there are some."""
        own = logits.topk(self.config.moe_router_topk, dim=-1).indices
        return own if self.layout.replay is None else self.layout.replay.replayed(self.layer_number - 1, own)

    def imbalance(self, logits: Tensor, chosen: Tensor, paths: SequencePaths) -> Tensor:
        """This rank's part of the load-balancing loss."""
        if self.config.sequence_parallel:  # tensor ranks divide the context rank's tokens
            rank, size = self.tp_group.rank(), self.tp_group.size()
            paths = replace(paths, first=paths.first.chunk(size)[rank], end=paths.end.chunk(size)[rank])
        return imbalance(logits.softmax(dim=-1), chosen, paths, self.tp_cp_group)


class MixtureLayer(TransformerLayer):
    """A layer with experts that gives its router the layout of the prefix trees.

    megatron-core 0.16.1 passes no such argument to routers. The layer sets it in every forward pass, so the router has
    that of the right micro-batch also when activations are recomputed.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        experts, its = self.mlp, self.mlp.token_dispatcher
        if its.ep_size == its.tp_size == 1:
            groups = get_default_pg_collection()
            experts.token_dispatcher = LocalDispatcher(
                experts.num_local_experts, experts.local_expert_indices, self.config, groups
            )

    def forward(self, *args: Any, attention_bias: AttentionLayout, **options: Any) -> Any:
        """Run Megatron's layer. `attention_bias` is the layout, also for the attention (`TreeAttention`)."""
        self.mlp.router.layout = attention_bias
        return super().forward(*args, attention_bias=attention_bias, **options)
