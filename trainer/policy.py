"""The policy being trained: model, optimizer and checkpoints of this rank, and one update of the weights."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from proxy.pool.errors import UserError
from trainer import config as settings
from trainer.loss import Sums, Tokens
from trainer.megatron.checkpoint import Checkpoints
from trainer.megatron.model import PolicyModel, build_model, transformer_config
from trainer.megatron.optimizer import build_optimizer, set_learning_rate, sum_gradients, wrap
from trainer.megatron.parallel import Ranks, max_over_data_ranks, sum_over_data_ranks, whole_vocabulary
from trainer.megatron.weights import load_weights, write_model
from trainer.packed import Packed
from trainer.packing import Share, pack
from trainer.rows import Row
from trainer.shape import read_shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


LossOf = Callable[[torch.Tensor, Tokens], tuple[torch.Tensor, Sums]]
"""Logprobs and tokens of a micro-batch -> the sum of its losses, and what is said about it."""


@dataclass(frozen=True)
class Update:
    """One optimizer step: its loss per token over all ranks, and the gradient norm before clipping."""

    loss: float
    grad_norm: float
    sums: Sums | None
    """None when there was nothing to learn from."""


class Policy:
    """A model from a Hugging Face directory, ready to be trained."""

    def __init__(self, source: Path, config: settings.Config, ranks: Ranks):
        self.source, self.ranks = source, ranks
        self.shape = shape = read_shape(source)
        megatron = transformer_config(shape, DTYPES[config.parallel.precision], config.parallel)
        multiple = ranks.tensor_world if config.parallel.sequence else 1
        self.share = Share(ranks.device, ranks.context_rank, ranks.context_world, multiple)
        self.model = build_model(shape, megatron, config.parallel).to(ranks.device, megatron.params_dtype)
        load_weights(self.model, source)
        self.ddp = wrap(self.model, config.parallel)
        self.optimizer = build_optimizer(self.ddp, config.optimizer, config.parallel)
        self.checkpoints = Checkpoints(self.model, self.optimizer)
        self.reference = self._frozen(megatron, config.parallel) if config.loss.kl else None

    def _frozen(self, megatron: TransformerConfig, parallel: settings.Parallel) -> PolicyModel:
        """The initial weights a second time, for the KL to them."""
        model = build_model(self.shape, megatron, parallel).to(self.ranks.device, megatron.params_dtype)
        load_weights(model, self.source)
        return model.requires_grad_(False)

    def write_hf(self, target: Path) -> None:
        """Export the current weights as a Hugging Face directory."""
        write_model(self.model, self.source, target)

    def update(self, micros: Iterable[Sequence[Row]], denominator: int, loss_of: LossOf, rate: float) -> Update:
        """One optimizer step on this rank's micro-batches. `denominator` counts the tokens of the whole batch.

        Nothing changes when it is 0. Raises UserError when the gradient is not finite; the checkpoints are then intact.
        """
        if denominator == 0:
            return Update(0.0, 0.0, None)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        said = [self._backward(rows, denominator, loss_of) for rows in micros]
        sum_gradients(self.ddp)
        set_learning_rate(self.optimizer, rate)
        _, norm, _ = self.optimizer.step()
        if not math.isfinite(norm):
            raise UserError(f"the gradient norm is {norm}; lower optimizer.lr or raise optimizer.eps and start again")
        losses = torch.stack([loss for loss, _ in said]).sum()
        totals = sum_over_data_ranks(torch.cat((losses[None], torch.stack([part.sums for _, part in said]).sum(0))))
        peak = max_over_data_ranks(torch.stack([part.peak for _, part in said]).max())
        return Update(totals[0].item(), float(norm), Sums(totals[1:], peak))

    def _backward(self, rows: Sequence[Row], denominator: int, loss_of: LossOf) -> tuple[torch.Tensor, Sums]:
        packed, tokens = pack(rows, self.share)
        logp = self.ddp(packed)[packed.branches]
        # the weights do not change within a step, so what a pass before it would give is here already
        tokens = replace(tokens, old_logp=logp.detach())
        if self.reference is not None:
            with torch.no_grad():
                tokens = replace(tokens, reference_logp=self.reference(packed)[packed.branches])
        loss, said = loss_of(logp, tokens)
        loss = loss / denominator
        loss.backward()
        return loss.detach(), said

    @torch.no_grad()
    def logprobs(self, packed: Packed) -> torch.Tensor:
        """The current logprob of every trained token, in the order of the rows."""
        return self.model(packed)[packed.branches]

    @torch.no_grad()
    def best(self, packed: Packed) -> torch.Tensor:
        """The token that the model itself would choose at the place of every trained token."""
        return whole_vocabulary(self.model.logits(packed)).argmax(-1).view(-1)[packed.branches]
