"""The multi-token-prediction (MTP) head of a policy: one layer that drafts the tokens after the next one.

Draft d at token u of a tree takes the hidden state of the token before u (the policy's for d = 1, draft d - 1's for the
others) and the embedding of u. A decoder layer attends over u's ancestors; the policy's own LM head then gives the
distribution of u's children. Its teacher is the policy's distribution at u. A branch point needs no special case, as
each child is a token of its own. This is the draft model of SGLang 0.5.23 (srt/models: mimo_mtp.py, qwen3_moe_mtp.py):
it has one layer, which it runs again for every further draft. One difference remains: in SGLang, the keys of older
tokens are those of draft 1; here they are of the same draft.
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
from trainer.data.to_device import to_device
from trainer.megatron.attention.layout import AttentionLayout
from trainer.megatron.bucket_padding import without_padding
from trainer.megatron.model.experts import mark_experts
from trainer.megatron.model.model import PolicyModel, SharedNorm
from trainer.megatron.mtp.loss import parents, without_first_tokens
from trainer.megatron.optimizer import load_state

_PREFIX = "head."


@dataclass(frozen=True)
class HeadInput:
    """The input of the head for one micro-batch, without gradients. N: its tokens."""

    hidden: Tensor
    """[N, 1, hidden] of the policy, after its last norm. With several tensor ranks: this rank's part of N."""
    embedded: Tensor
    """The embeddings of the same tokens."""
    angles: Tensor
    """[N, 1, 1, head_dim] for RoPE."""
    before: Tensor
    """[N] the index of the token before each one, along its branch."""
    layouts: tuple[AttentionLayout, ...]
    """One for each draft: which tokens attend to which."""


class MTPHead(MegatronModule):
    """The head's own parameters. Embedding and LM head are the policy's, which get no gradient here."""

    def __init__(self, model: PolicyModel):
        config, first = model.config, model.decoder.layers[0]
        super().__init__(config)
        self.token_layernorm = SharedNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.hidden_layernorm = SharedNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.input_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.input_proj.to(config.params_dtype)
        vars(self.input_proj.weight)["sequence_parallel"] = config.sequence_parallel
        # SGLang 0.5.23 builds the draft layer like the model's first layer; in a mixture of experts, layers may differ.
        self.block = type(first)(config, first.submodules_config, layer_number=first.layer_number)
        self.final_layernorm = SharedNorm(config, config.hidden_size, config.layernorm_epsilon)
        mark_experts(self)

    @torch.no_grad()
    def copy_last_layer(self, model: PolicyModel) -> None:
        """Start a head where the model directory has none.

        It becomes the policy's last layer over the sum of hidden state and embedding: the last layer of the kind
        (dense, or with experts) that the head's block has.
        """
        same_kind = [
            layer for layer in model.decoder.layers if layer.submodules_config.mlp == self.block.submodules_config.mlp
        ]
        self.block.load_state_dict(same_kind[-1].state_dict())
        self.final_layernorm.load_state_dict(model.decoder.final_layernorm.state_dict())
        for norm in (self.token_layernorm, self.hidden_layernorm):
            norm.weight.fill_(1.0)
        identity = torch.eye(self.config.hidden_size)
        self.input_proj.weight.copy_(torch.cat((identity, identity), dim=1))

    def forward(self, context: HeadInput) -> list[Tensor]:
        """[N, 1, hidden] of all tokens for each draft. Draft d has no values for the first d tokens of a tree."""
        drafts, hidden = [], context.hidden
        token = self.token_layernorm(context.embedded)
        for layout in context.layouts:
            before = _own_part(
                _gather_tokens(hidden, self.config.sequence_parallel, divided=True)[context.before], hidden
            )
            mixed = self.input_proj(torch.cat((self.hidden_layernorm(before), token), dim=-1))
            mixed, _ = self.block(mixed, None, rotary_pos_emb=context.angles, attention_bias=layout)
            hidden = self.final_layernorm(mixed)
            drafts.append(_gather_tokens(hidden, self.config.sequence_parallel, divided=False))
        return drafts


@torch.no_grad()
def head_input(model: PolicyModel, packed: MicroBatch, hidden: Tensor, drafts: int, masks_first: bool) -> HeadInput:
    """The head's input from what the policy's decoder returned for `packed` (`hidden`).

    The engine places a draft at the position of its hidden state, one before its token's. `masks_first`: at position 0,
    the embedding is zero, as in MiMo's head.
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
        before=to_device(parents(packed.runs), packed.tokens.device),
        layouts=tuple(
            AttentionLayout(without_first_tokens(packed.runs, depth), packed.queries) for depth in range(1, drafts + 1)
        ),
    )


def teacher_states(model: PolicyModel, hidden: Tensor) -> Tensor:
    """The policy's hidden states of all tokens, [N, 1, hidden], without a gradient."""
    return _gather_tokens(hidden.detach(), model.config.sequence_parallel, divided=False)


def _gather_tokens(part: Tensor, sequence_parallel: bool, divided: bool) -> Tensor:
    """The tokens of all tensor ranks, where these divide them.

    `divided`: each rank then computes other tokens, so the backward pass must sum their gradients.
    """
    if not sequence_parallel:
        return part
    return gather_from_sequence_parallel_region(part, tensor_parallel_output_grad=divided)


def _own_part(tokens: Tensor, like: Tensor) -> Tensor:
    """This rank's tokens out of all; `like` has as many as the rank holds."""
    if len(tokens) == len(like):
        return tokens
    rank = parallel_state.get_tensor_model_parallel_rank()
    return tokens[rank * len(like) : (rank + 1) * len(like)]


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head and its optimizer in a checkpoint, under names that differ from the model's."""

    head: MTPHead
    optimizer: MegatronOptimizer

    def state(self, loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
        """The entries of a checkpoint."""
        head = self.head.sharded_state_dict(prefix=_PREFIX, metadata=metadata)
        with without_padding(self.optimizer):
            optimizer = self.optimizer.sharded_state_dict(head, is_loading=loading, metadata=metadata)
        return {"head": head, "head_optimizer": optimizer}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore head and optimizer from the entries of a loaded checkpoint."""
        self.head.load_state_dict({name.removeprefix(_PREFIX): value for name, value in state["head"].items()})
        load_state(self.optimizer, state["head_optimizer"])


class TensorParallelVocabulary:
    """A vocabulary that is divided over the tensor ranks (`VocabularyShards` of trainer/megatron/mtp/loss.py)."""

    def __init__(self) -> None:
        self.group: Any = parallel_state.get_tensor_model_parallel_group()
        self.rank, self.world = self.group.rank(), self.group.size()

    def sum(self, values: Tensor) -> Tensor:
        return reduce_from_tensor_model_parallel_region(
            values.clone(memory_format=torch.contiguous_format)
        )  # reduces in place

    def max(self, values: Tensor) -> Tensor:
        maximum = values.detach().clone()
        torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return maximum

    def gather(self, values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(self.world)]
        torch.distributed.all_gather(parts, values.detach().contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
