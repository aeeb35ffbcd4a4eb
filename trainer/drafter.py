"""Trains the policy's multi-token-prediction (MTP) head beside the policy, for speculative decoding.

In every update the head learns from the policy's hidden states and distributions of the same micro-batches, before the
update changes the policy. It has its own optimizer and gradient norm, so the policy's update is bit for bit that of a
run without a head. Not here: the loss (trainer/megatron/mtp/loss.py), the layer (trainer/megatron/mtp/head.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from proxy.pool.errors import UserError
from trainer import config as settings
from trainer.config.model_shape import ModelShape
from trainer.data.micro_batch import MicroBatch
from trainer.data.row import TrainingRow
from trainer.data.to_device import to_device
from trainer.megatron.model.model import PolicyModel
from trainer.megatron.mtp.head import MTPHead, TensorParallelVocabulary, head_input, teacher_states
from trainer.megatron.mtp.loss import DraftMetrics, acceptance, tail_kl, trained_draft_targets
from trainer.megatron.mtp.weights import HEAD_NAMINGS, load_head
from trainer.megatron.optimizer import build_optimizer, gradient_norm, set_learning_rate, sum_gradients, wrap
from trainer.megatron.parallel import sum_over_data_ranks


class Drafter:
    """Trains the head. Per update: `begin`, `learn` after the policy's forward pass of each micro-batch,
    `gradient_norm`, `finish`."""

    def __init__(self, model: PolicyModel, shape: ModelShape, source: Path, config: settings.Config):
        if shape.family not in HEAD_NAMINGS:
            raise UserError(
                f"{source} is of family {shape.family}, for which SGLang has no draft model; set mtp.drafts = 0 or use "
                f"one of {', '.join(HEAD_NAMINGS)}"
            )
        self.model, self.options, self.layout = model, config.mtp, HEAD_NAMINGS[shape.family]
        device = next(model.parameters()).device
        self.head = MTPHead(model).to(device)
        load_head(self.head, model, source, self.layout)
        self.ddp = wrap(self.head, config.parallel)
        rate = config.optimizer.lr if config.mtp.lr is None else config.mtp.lr
        self.trained, self.lr_ratio = rate > 0, rate / config.optimizer.lr
        # Its rate falls as the policy's does, so it needs no lowest one of its own.
        options = msgspec.structs.replace(config.optimizer, lr=rate or config.optimizer.lr, min_lr=0.0)
        self.optimizer = build_optimizer(self.ddp, options, config.parallel)
        self.shards = TensorParallelVocabulary()
        self.hidden: Tensor | None = None
        # megatron-core 0.16.1 hands the last hidden states to the LM head only, so a hook is the way to get them.
        model.decoder.register_forward_hook(self._keep)

    def _keep(self, _module: Any, _inputs: Any, output: Tensor) -> None:
        self.hidden = output.detach()

    def begin(self, micros: Sequence[Sequence[TrainingRow]]) -> None:
        """Count the places of each draft over all ranks' micro-batches, which the losses are divided by. Collective."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        depths = range(1, self.options.drafts + 1)
        counts = [sum(trained_draft_targets(rows, depth).sum() for rows in micros) for depth in depths]
        device = next(self.head.parameters()).device
        self.counts = sum_over_data_ranks(torch.tensor(counts, dtype=torch.float64, device=device))
        self.sums = torch.zeros(2, self.options.drafts, dtype=torch.float64, device=device)

    def learn(self, rows: Sequence[TrainingRow], packed: MicroBatch) -> None:
        """Add this micro-batch's gradient to the head's. `packed`: it, as the policy has just computed it."""
        assert self.hidden is not None
        hidden, self.hidden = self.hidden, None
        with torch.set_grad_enabled(self.trained):
            loss = self.loss(rows, packed, hidden)
        if self.trained:
            loss.backward()

    def loss(self, rows: Sequence[TrainingRow], packed: MicroBatch, hidden: Tensor) -> Tensor:
        """Return sum_d 1 / D sum_places KL / (places of draft d in the whole batch).

        A place counts once for each branch that shares it. `hidden`: what the policy's LM head was given.
        """
        context = head_input(self.model, packed, hidden, self.options.drafts, self.layout.masks_first)
        teacher = teacher_states(self.model, hidden)
        losses = []
        for index, states in enumerate(self.ddp(context)):
            places, branches = drafted_at(rows, packed, index + 1)
            kl, accepted = self._compare(teacher[places], states[places])
            totals = (kl * branches).sum(), (accepted * branches).sum()
            self.sums[:, index] += torch.stack(totals).detach()
            losses.append(totals[0] / self.counts[index].clamp(min=1))
        return torch.stack(losses).mean()

    def _compare(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        """Return KL and acceptance, [places] each. Only `logits_tokens` rows of logits exist at a time."""
        size = self.model.logits_tokens
        parts = [
            checkpoint(self._compare_some, *part, use_reentrant=False)
            for part in zip(teacher.split(size), student.split(size), strict=True)
        ]
        kl, accepted = zip(*parts, strict=True)
        return torch.cat(kl), torch.cat(accepted)

    def _compare_some(self, teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            p = _wide(self.model.frozen_logits(teacher))
        q = _wide(self.model.frozen_logits(student))
        return tail_kl(p, q, self.options.LIKELIEST, self.shards), acceptance(p, q.detach(), self.shards)

    def gradient_norm(self) -> float:
        """Sum the head's gradient over all ranks and return its norm; 0 where the head is not trained. Collective."""
        if not self.trained:
            return 0.0
        sum_gradients(self.ddp)
        return gradient_norm(self.optimizer)

    def finish(self, learning_rate: float, norm: float) -> DraftMetrics:
        """Take one step of the head's optimizer and return what it learned. Collective.

        `learning_rate`: the policy's, which is scaled by mtp.lr / optimizer.lr. `norm`: of the gradient, finite.
        """
        if self.trained:
            set_learning_rate(self.optimizer, learning_rate * self.lr_ratio)
            self.optimizer.step()
        means = sum_over_data_ranks(self.sums) / self.counts.clamp(min=1)
        return DraftMetrics(loss=means[0].mean().item(), grad_norm=norm, accepted=tuple(means[1].tolist()))


def drafted_at(rows: Sequence[TrainingRow], packed: MicroBatch, depth: int) -> tuple[Tensor, Tensor]:
    """Return the distinct places where draft `depth` is compared with the policy, and the branches through each."""
    places, branches = np.unique(packed.nodes[trained_draft_targets(rows, depth)], return_counts=True)
    return to_device(places, packed.tokens.device), to_device(branches, packed.tokens.device)


def _wide(logits: Tensor) -> Tensor:
    """[places, 1, vocabulary] -> [places, vocabulary] in float32 at least: bfloat16 is too coarse for a KL."""
    return logits[:, 0].to(torch.promote_types(logits.dtype, torch.float32))
