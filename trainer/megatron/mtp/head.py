"""The multi-token-prediction head of a policy: one layer that drafts tokens after the next, and that learns to.

Draft d at token u of a tree takes the hidden state of the token before u (of the policy for d = 1, of draft d - 1
afterwards) and the embedding of u; a decoder layer attends over u's ancestors; the policy's own LM head gives the
distribution of u's children, for which the policy's at u is the teacher. So a branch point needs no care: each child is
a place of its own. That is the draft model of SGLang (srt/models/mimo_mtp.py, qwen3_moe_mtp.py), which has one layer
and uses it again for every further draft; there the keys of older tokens are those of draft 1, here of the same draft.
Left out: pipeline stages; ranks that share a micro-batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from trainer.data.micro_batch import MicroBatch
from trainer.megatron.bucket_padding import without_padding
from trainer.megatron.layout import AttentionLayout
from trainer.megatron.model.experts import mark_experts
from trainer.megatron.model.model import PolicyModel, SharedNorm
from trainer.megatron.mtp.loss import from_depth, parents

_PREFIX = "head."


@dataclass(frozen=True)
class HeadInput:
    """What the head is given of one micro-batch, without a gradient."""

    hidden: Tensor
    """[N, 1, hidden] of the policy, behind its last norm; this rank's part where tensor ranks divide the tokens."""
    embedded: Tensor
    """The same tokens' embeddings."""
    angles: Tensor
    """[N, 1, 1, head_dim] for RoPE."""
    before: Tensor
    """[N] where the token before each one is."""
    layouts: tuple[AttentionLayout, ...]
    """What attends to what, of each draft."""


class MTPHead(MegatronModule):
    """Its parameters are the draft model's own; embedding and LM head are the policy's, which get no gradient here."""

    def __init__(self, model: PolicyModel):
        config, first = model.config, model.decoder.layers[0]
        super().__init__(config)
        self.token_layernorm = SharedNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.hidden_layernorm = SharedNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.input_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_proj.to(config.params_dtype)
        vars(self.input_proj.weight)["sequence_parallel"] = config.sequence_parallel
        # the engine builds the layer as the model's first one, which in a mixture of experts may differ from others
        self.block = type(first)(config, first.submodules_config, layer_number=first.layer_number)
        self.final_layernorm = SharedNorm(config, config.hidden_size, config.layernorm_epsilon)
        mark_experts(self)

    @torch.no_grad()
    def imitate(self, model: PolicyModel) -> None:
        """Begin as the policy's last layer over the sum of hidden state and token, where a directory has no head."""
        alike = [
            layer for layer in model.decoder.layers if layer.submodules_config.mlp == self.block.submodules_config.mlp
        ]
        self.block.load_state_dict(alike[-1].state_dict())
        self.final_layernorm.load_state_dict(model.decoder.final_layernorm.state_dict())
        for norm in (self.token_layernorm, self.hidden_layernorm):
            norm.weight.fill_(1.0)
        same = torch.eye(self.config.hidden_size)
        self.input_proj.weight.copy_(torch.cat((same, same), dim=1))

    def forward(self, context: HeadInput) -> list[Tensor]:
        """The hidden states of each draft, [N, 1, hidden] of all tokens; those of a tree's first d hold nothing."""
        found, hidden = [], context.hidden
        token = self.token_layernorm(context.embedded)
        for layout in context.layouts:
            before = _own_part(_of_all(hidden, self.config.sequence_parallel, divided=True)[context.before], hidden)
            mixed = self.input_proj(torch.cat((self.hidden_layernorm(before), token), dim=-1))
            mixed, _ = self.block(mixed, None, rotary_pos_emb=context.angles, attention_bias=layout)
            hidden = self.final_layernorm(mixed)
            found.append(_of_all(hidden, self.config.sequence_parallel, divided=False))
        return found


@torch.no_grad()
def head_input(model: PolicyModel, packed: MicroBatch, hidden: Tensor, drafts: int, masks_first: bool) -> HeadInput:
    """`hidden` is what the policy's decoder gave for `packed`.

    The engine places a draft at the position of its hidden state, one before its token's. `masks_first`: at position 0
    the token counts as nothing, as MiMo's head has it.
    """
    embedded = model.embedding(input_ids=packed.tokens[None], position_ids=None)
    positions = (packed.positions - 1).clamp(min=0)
    if masks_first:
        embedded = embedded.masked_fill((_own_part(positions, embedded) == 0)[:, None, None], 0.0)
    model.rotary_pos_emb.positions = positions
    return HeadInput(
        hidden=hidden.detach(),
        embedded=embedded,
        angles=model.rotary_pos_emb(len(positions)),
        before=torch.from_numpy(parents(packed.runs)).to(packed.tokens.device),
        layouts=tuple(
            AttentionLayout(from_depth(packed.runs, depth), packed.queries) for depth in range(1, drafts + 1)
        ),
    )


def teacher_states(model: PolicyModel, hidden: Tensor) -> Tensor:
    """The policy's hidden states of all tokens, [N, 1, hidden]."""
    return _of_all(hidden.detach(), model.config.sequence_parallel, divided=False)


def _of_all(part: Tensor, sequence_parallel: bool, divided: bool) -> Tensor:
    """The tokens of all tensor ranks. `divided`: each rank goes on with other tokens, so gradients are summed."""
    if not sequence_parallel:
        return part
    return gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=divided)


def _own_part(every: Tensor, like: Tensor) -> Tensor:
    """This rank's tokens out of all."""
    if len(every) == len(like):
        return every
    rank = parallel_state.get_tensor_model_parallel_rank()
    return every[rank * len(like) : (rank + 1) * len(like)]


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head and its optimizer in a checkpoint, under names that are not the model's."""

    head: MTPHead
    optimizer: MegatronOptimizer

    def state(self, loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of them."""
        head = self.head.sharded_state_dict(prefix=_PREFIX, metadata=metadata)
        with without_padding(self.optimizer):
            optimizer = self.optimizer.sharded_state_dict(head, is_loading=loading, metadata=metadata)
        return {"head": head, "head_optimizer": optimizer}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.head.load_state_dict({name.removeprefix(_PREFIX): value for name, value in state["head"].items()})
        self.optimizer.load_state_dict(state["head_optimizer"])


class TensorParallelVocabulary:
    """A vocabulary that is divided over the tensor ranks (trainer/megatron/mtp/loss.py's Shards)."""

    def __init__(self) -> None:
        self.group: Any = parallel_state.get_tensor_model_parallel_group()
        self.rank, self.world = self.group.rank(), self.group.size()

    def sum(self, values: Tensor) -> Tensor:
        return reduce_from_tensor_model_parallel_region(values.clone(memory_format=torch.contiguous_format))  # in place

    def max(self, values: Tensor) -> Tensor:
        found = values.detach().clone()
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return found

    def gather(self, values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(self.world)]
        torch.distributed.all_gather(parts, values.detach().contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
