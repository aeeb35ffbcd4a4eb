"""The policy being trained: model, optimizer and checkpoints of this rank, and one update of the weights."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from proxy.pool.errors import UserError
from trainer import config as settings
from trainer.config.model_shape import read_shape
from trainer.data.micro_batch import MicroBatch
from trainer.data.packing import ContextShard, pack
from trainer.data.routed_experts import replayed
from trainer.data.row import Row
from trainer.drafter import Drafter
from trainer.loss.policy_loss import LossSums, LossTokens
from trainer.megatron.checkpoint import Checkpoints
from trainer.megatron.model.model import PolicyModel, build_model, transformer_config
from trainer.megatron.mtp.head import HeadCheckpoint
from trainer.megatron.mtp.loss import DraftMetrics
from trainer.megatron.mtp.weights import export_head, kept_head
from trainer.megatron.optimizer import build_optimizer, set_learning_rate, sum_gradients, wrap
from trainer.megatron.parallel import Ranks, max_over_data_ranks, sum_over_data_ranks
from trainer.megatron.replay import ReplayCounter
from trainer.megatron.schedule import forward, forward_backward
from trainer.megatron.weights import load_weights, write_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


LossOf = Callable[[torch.Tensor, LossTokens], tuple[torch.Tensor, LossSums]]
"""Logprobs and tokens of a micro-batch -> the sum of its losses, and what is said about it."""


@dataclass(frozen=True)
class Update:
    """One optimizer step: its loss per token over all ranks, and the gradient norm before clipping."""

    loss: float
    grad_norm: float
    sums: LossSums | None
    """None when there was nothing to learn from."""
    drafts: DraftMetrics | None = None
    """What the MTP head learned, where there is one."""
    routing: dict[str, float] = field(default_factory=dict)
    """Of the replay of recorded experts (trainer/megatron/replay.py)."""


class Policy:
    """A model from a Hugging Face directory, ready to be trained."""

    def __init__(self, source: Path, config: settings.Config, ranks: Ranks):
        self.source, self.ranks = source, ranks
        self.shape = shape = read_shape(source)
        megatron = transformer_config(shape, DTYPES[config.parallel.precision], config.parallel)
        multiple = ranks.tensor_world if config.parallel.sequence else 1
        self.balance = config.loss.balance
        self.share = ContextShard(
            ranks.device, ranks.context_rank, ranks.context_world, multiple, paths=self.balance > 0
        )
        self.model = build_model(shape, megatron, config.parallel).to(ranks.device, megatron.params_dtype)
        load_weights(self.model, source)
        self.mixture = replayed(config.loss, shape)
        if self.mixture is not None:
            self.model.replay_counter = ReplayCounter(ranks.device)
        self.ddp = wrap(self.model, config.parallel)
        self.optimizer = build_optimizer(self.ddp, config.optimizer, config.parallel)
        self.drafter = Drafter(self.model, shape, source, config) if config.mtp.drafts else None
        head = HeadCheckpoint(self.drafter.head, self.drafter.optimizer) if self.drafter is not None else None
        layout = {
            "parallel.precision": config.parallel.precision,
            "parallel.distributed_optimizer": config.parallel.distributed_optimizer,
        }
        self.checkpoints = Checkpoints(self.model, self.optimizer, asdict(shape) | layout, head)
        if config.loss.balance and shape.experts is None:
            raise UserError(f"loss.balance = {config.loss.balance} is for experts, which {source} lacks; set it to 0")
        self.reference = self._frozen(megatron, config.parallel) if config.loss.kl else None

    def _frozen(self, megatron: TransformerConfig, parallel: settings.Parallel) -> PolicyModel:
        """The initial weights a second time, for the KL to them."""
        model = build_model(self.shape, megatron, parallel).to(self.ranks.device, megatron.params_dtype)
        load_weights(model, self.source)
        return model.requires_grad_(False)

    def write_hf(self, target: Path) -> None:
        """Export the current weights as a Hugging Face directory."""
        drafter = self.drafter
        head = kept_head(self.source) if drafter is None else export_head(drafter.head, drafter.layout)
        write_model(self.model, self.source, target, head)

    def update(self, micros: Iterable[Sequence[Row]], denominator: int, loss_of: LossOf, rate: float) -> Update:
        """One optimizer step on this rank's micro-batches. `denominator` counts the tokens of the whole batch.

        Nothing changes when it is 0. Raises UserError when the gradient is not finite; the checkpoints are then intact.
        """
        if denominator == 0:
            return Update(0.0, 0.0, None)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        micros = list(micros)
        if self.drafter is not None:
            self.drafter.begin(micros)
        parts = [pack(rows, self.share) for rows in micros]
        reference = [] if self.reference is None else forward(self.reference, [packed for packed, _ in parts])

        def loss(number: int, edges: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, LossSums]]:
            packed, tokens = parts[number]
            if self.drafter is not None:
                self.drafter.learn(micros[number], packed)
            logp = edges[packed.branches]
            # the weights do not change within a step, so what a pass before it would give is here already
            tokens = replace(tokens, old_logp=logp.detach())
            if reference:
                tokens = replace(tokens, reference_logp=reference[number][packed.branches])
            loss, said = loss_of(logp, tokens)
            loss = loss / denominator
            return loss, (loss.detach(), said)

        self.model.balance = self.balance / denominator
        said = forward_backward(self.ddp, [packed for packed, _ in parts], loss)
        self.model.balance = 0.0  # what measures gradients of its own means those of its loss
        sum_gradients(self.ddp)
        set_learning_rate(self.optimizer, rate)
        _, norm, _ = self.optimizer.step()
        if not math.isfinite(norm):
            raise UserError(f"the gradient norm is {norm}; lower optimizer.lr or raise optimizer.eps and start again")
        drafts = None if self.drafter is None else self.drafter.finish(rate)
        return replace(self._reached(said, float(norm)), drafts=drafts)

    def _reached(self, said: list[tuple[torch.Tensor, LossSums]], norm: float) -> Update:
        """What the last stage's ranks have seen, summed over them and told to all."""
        totals = None
        if said:
            losses = torch.stack([loss for loss, _ in said]).sum()
            sums = sum_over_data_ranks(torch.cat((losses[None], torch.stack([part.sums for _, part in said]).sum(0))))
            peak = max_over_data_ranks(torch.stack([part.peak for _, part in said]).max())
            totals = torch.cat((sums, peak[None]))
        totals = self.ranks.from_last_stage(totals)
        routing = {} if self.model.replay_counter is None else self.model.replay_counter.metrics()
        return Update(totals[0].item(), norm, LossSums(totals[1:-1], totals[-1]), routing=routing)

    def logprobs(self, packed: MicroBatch) -> torch.Tensor:
        """The current logprob of every trained token that this rank's stretch predicts, in the order of the rows."""
        found = forward(self.model, [packed])
        return self.ranks.from_last_stage(found[0] if found else None)[packed.branches]

    def best(self, packed: MicroBatch) -> torch.Tensor:
        """The token that the model itself would choose at the place of each of these tokens."""
        chosen = forward(self.model, [packed], self.model.best)
        return self.ranks.from_last_stage(chosen[0] if chosen else None)[packed.branches]
