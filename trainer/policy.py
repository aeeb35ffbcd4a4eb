"""The policy being trained: model, optimizer and checkpoints of this rank, and one update of the weights."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from proxy.pool.errors import UserError
from proxy.pool.terminal.progress import MEGABYTE
from proxy.pool.tokenizer_fingerprint import fingerprint
from trainer import config as settings
from trainer.config.model_shape import read_shape
from trainer.data.micro_batch import MicroBatch
from trainer.data.packing import ContextShard, pack
from trainer.data.routed_experts import replayed
from trainer.data.row import TrainingRow
from trainer.drafter import Drafter
from trainer.loss.policy_loss import LossSums, LossTokens
from trainer.megatron.checkpoint import Checkpoints
from trainer.megatron.model.model import PolicyModel, build_model, transformer_config
from trainer.megatron.mtp.head import HeadCheckpoint
from trainer.megatron.mtp.loss import DraftMetrics
from trainer.megatron.mtp.weights import export_head, kept_head
from trainer.megatron.optimizer import build_optimizer, gradient_norm, set_learning_rate, sum_gradients, wrap
from trainer.megatron.parallel import Ranks, max_over_data_ranks, sum_over_data_ranks
from trainer.megatron.replay import ReplayCounter
from trainer.megatron.schedule import forward, forward_backward
from trainer.megatron.weights import load_weights, write_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LossFunction = Callable[[torch.Tensor, LossTokens], tuple[torch.Tensor, LossSums]]
"""(logprobs [trained tokens], tokens) of a micro-batch -> (the sum of its losses, its statistics)."""


@dataclass(frozen=True)
class LossInput:
    """What the loss got for the trained tokens of one micro-batch, for reports that compute more from it."""

    logp: torch.Tensor
    """[trained tokens] before the update, without a gradient."""
    tokens: LossTokens


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step, or those of an epoch added up."""

    loss: float
    """Mean loss per trained token, over all ranks."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    sums: LossSums | None
    """The loss's statistics, over all ranks. None when there was nothing to learn from."""
    drafts: DraftMetrics | None = None
    """What the MTP head learned, where there is one."""
    routing: dict[str, float] = field(default_factory=dict)
    """Metrics of the replay of recorded experts (trainer/megatron/replay.py)."""
    loss_inputs: Sequence[LossInput] = ()
    """One per micro-batch of this rank, in order. Empty on all pipeline stages but the last, which has the loss."""
    later: "Sequence[Update]" = ()
    """Every update of the step in order, where it took several and this is their sum."""


@dataclass(frozen=True)
class Minibatch:
    """What one update learns from."""

    micros: Sequence[Sequence[TrainingRow]]
    """Rows of this rank's micro-batches."""
    tokens: int
    """What the loss is divided by: tokens over all ranks that are trained and not imitated, but at least 1."""
    balanced: int = 0
    """Trained tokens over all ranks, with the imitated ones, which the balance loss is divided by. 0: as `tokens`."""


@dataclass(frozen=True)
class _PackedMinibatch:
    """A minibatch as tensors, with what does not change while a step updates the weights."""

    rows: Minibatch
    packed: Sequence[MicroBatch]
    tokens: Sequence[LossTokens]


class GradientNotFinite(UserError):
    """An update was not taken: weights and optimizers are as before it. `norms` says what their gradients are."""

    def __init__(self, norms: str):
        super().__init__(f"{norms}; lower optimizer.lr or raise optimizer.eps and start again")
        self.norms = norms


class Policy:
    """A model from a Hugging Face directory, ready to be trained."""

    def __init__(self, source: Path, config: settings.Config, ranks: Ranks):
        self.source, self.ranks = source, ranks
        self.shape = shape = read_shape(source)
        multiple = ranks.tensor_world if config.parallel.sequence else 1
        self.balance = config.loss.balance
        self.shard = ContextShard(
            ranks.device, ranks.context_rank, ranks.context_world, multiple, paths=self.balance > 0
        )
        self.model = self._load_model(config.parallel, source)
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
            raise UserError(
                f"loss.balance = {config.loss.balance} balances experts, but {source} has none; set it to 0"
            )
        self.reference = self._reference_model(config) if config.loss.kl else None
        """A second model, for the KL term."""

    def _reference_model(self, config: settings.Config) -> PolicyModel:
        """The model of `loss.kl`. It replays experts as the policy does, so that KL holds no choice between them."""
        source = Path(config.loss.kl_model or self.source)
        if read_shape(source) != self.shape or fingerprint(source) != fingerprint(self.source):
            raise UserError(
                f"loss.kl_model = {source} has another shape or tokenizer than model = {self.source}, so their "
                "logprobs cannot be compared; choose a model that was trained from the same one"
            )
        model = self._load_model(config.parallel, source).requires_grad_(False)
        if self.mixture is not None:
            model.replay_counter = ReplayCounter(self.ranks.device)  # never read: the policy's own choices are reported
        return model

    def refer_to(self, directory: Path) -> None:
        """Make an exported model of this run the reference of the KL term."""
        assert self.reference is not None
        if not directory.is_dir():
            raise UserError(
                f"{directory} is gone, which loss.kl_steps_ago needs; restore it, change loss.kl_steps_ago, or go "
                "back to a step whose reference is there with `trainer rollback`"
            )
        self._load(self.reference, directory)

    def _load_model(self, parallel: settings.Parallel, source: Path) -> PolicyModel:
        megatron = transformer_config(self.shape, DTYPES[parallel.precision], parallel)
        model = build_model(self.shape, megatron, parallel).to(self.ranks.device, megatron.params_dtype)
        self._load(model, source)
        return model

    def _load(self, model: PolicyModel, source: Path) -> None:
        """Load weights, and show how much of rank 0's part is there."""
        size = sum(param.nbytes for param in model.parameters()) / MEGABYTE
        with self.ranks.shown(f"loading {source}", size, "MB") as advance:
            load_weights(model, source, advance)

    def write_hf(self, target: Path) -> None:
        """Export the current weights as a Hugging Face directory."""
        drafter = self.drafter
        head = kept_head(self.source) if drafter is None else export_head(drafter.head, drafter.layout)
        write_model(self.model, self.source, target, head)

    def is_finite(self) -> bool:
        """Whether all weights, and those of the MTP head, are finite numbers. Collective."""
        parts = [self.model] if self.drafter is None else [self.model, self.drafter.head]
        finite = (param.isfinite().all() for part in parts for param in part.parameters())
        return self.ranks.agree(all(finite))

    def update(
        self,
        micros: Iterable[Sequence[TrainingRow]],
        denominator: int,
        loss_function: LossFunction,
        learning_rate: float,
        balanced: int = 0,
    ) -> Update:
        """Take one optimizer step on this rank's micro-batches. Collective.

        `denominator`: trained tokens of the whole batch, over all ranks; when it is 0 nothing changes. `balanced`: as
        in Minibatch. Raises GradientNotFinite on every rank before anything has changed.
        """
        if denominator == 0:
            return Update(loss=0.0, grad_norm=0.0, learning_rate=learning_rate, sums=None)
        minibatch = self._packed(Minibatch(list(micros), denominator, balanced))
        update = self._step(minibatch, loss_function, learning_rate)
        return replace(update, routing=self._routing())

    def learn(
        self,
        minibatches: Sequence[Minibatch],
        orders: Sequence[Sequence[int]],
        loss_function: LossFunction,
        learning_rate: float,
        compares_with_old: bool,
    ) -> Update:
        """Take an optimizer step on each minibatch in each epoch, in its order, and return the first epoch's sum.

        Collective. Reference logprobs, and old ones where the loss compares with them, are computed once, before the
        first step. GradientNotFinite may come after some steps: the caller loads the last checkpoint then.
        """
        if len(minibatches) == len(orders) == 1 or not minibatches[0].tokens:
            only = minibatches[0]
            return self.update(only.micros, only.tokens, loss_function, learning_rate, only.balanced)
        everything = [self._packed(minibatch) for minibatch in minibatches]
        if compares_with_old:
            everything = [self._with_old(minibatch) for minibatch in everything]
            self._routing()  # the pass over the old weights is not counted
        first: dict[int, Update] = {}
        taken: list[Update] = []
        routing: dict[str, float] = {}
        for order in orders:
            for number in order:
                update = self._step(everything[number], loss_function, learning_rate)
                first.setdefault(number, update)
                taken.append(replace(update, loss_inputs=()))
            routing = routing or self._routing()  # later epochs are not counted
        self._routing()
        counts = [minibatch.tokens for minibatch in minibatches]
        return replace(_added([first[number] for number in range(len(minibatches))], counts, taken), routing=routing)

    def _routing(self) -> dict[str, float]:
        """Metrics of the replay of recorded experts since the last call. Collective."""
        return {} if self.model.replay_counter is None else self.model.replay_counter.metrics()

    def _packed(self, minibatch: Minibatch) -> _PackedMinibatch:
        """The minibatch's tensors, with the reference's logprobs where there is a reference. Collective."""
        parts = [pack(rows, self.shard) for rows in minibatch.micros]
        packed, tokens = [packed for packed, _ in parts], [tokens for _, tokens in parts]
        if self.reference is not None and (edges := forward(self.reference, packed)):
            tokens = [
                replace(part, reference_logp=logp[micro.branches])
                for part, logp, micro in zip(tokens, edges, packed, strict=True)
            ]
        return _PackedMinibatch(minibatch, packed, tokens)

    def _with_old(self, minibatch: _PackedMinibatch) -> _PackedMinibatch:
        """The minibatch with the logprobs of the current weights as its old ones. Collective."""
        edges = forward(self.model, minibatch.packed)
        if not edges:  # not the last pipeline stage
            return minibatch
        triples = zip(minibatch.tokens, edges, minibatch.packed, strict=True)
        return replace(minibatch, tokens=[replace(part, old_logp=e[micro.branches]) for part, e, micro in triples])

    def _step(self, minibatch: _PackedMinibatch, loss_function: LossFunction, learning_rate: float) -> Update:
        """Take one optimizer step. Collective."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        micros, denominator = minibatch.rows.micros, minibatch.rows.tokens
        if self.drafter is not None:
            self.drafter.begin(micros)

        def loss_of(number: int, edges: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, LossSums, LossInput]]:
            packed, tokens = minibatch.packed[number], minibatch.tokens[number]
            if self.drafter is not None:
                self.drafter.learn(micros[number], packed)
            logp = edges[packed.branches]
            if tokens.old_logp is None:
                # This pass has the old weights in the only update of a batch; in others they are not compared with.
                tokens = replace(tokens, old_logp=logp.detach())
            loss, sums = loss_function(logp, tokens)
            loss = loss / denominator
            return loss, (loss.detach(), sums, LossInput(logp.detach(), tokens))

        self.model.balance = self.balance / (minibatch.rows.balanced or denominator)
        micro_results = forward_backward(self.ddp, minibatch.packed, loss_of)
        self.model.balance = 0.0  # a pass that measures the gradient of a loss must not add the balance loss to it
        norm, head_norm = self._finite_norms()
        set_learning_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        drafts = None if self.drafter is None else self.drafter.finish(learning_rate, head_norm)
        loss, sums = self._totals([(loss, sums) for loss, sums, _ in micro_results])
        inputs = [inputs for _, _, inputs in micro_results]
        return Update(
            loss=loss, grad_norm=norm, learning_rate=learning_rate, sums=sums, drafts=drafts, loss_inputs=inputs
        )

    def _finite_norms(self) -> tuple[float, float]:
        """Sum the gradients over ranks and return their norms: the policy's, and the MTP head's. Collective.

        Raises GradientNotFinite on every rank when one of them is not finite.
        """
        sum_gradients(self.ddp)
        norm = gradient_norm(self.optimizer)
        head_norm = 0.0 if self.drafter is None else self.drafter.gradient_norm()
        if not self.ranks.agree(math.isfinite(norm) and math.isfinite(head_norm)):
            self._routing()  # the batch is set aside, and so are its counts
            head = "" if self.drafter is None else f", that of the MTP head {head_norm}"
            raise GradientNotFinite(f"the gradient norm is {norm}{head}")
        return norm, head_norm

    def _totals(self, micro_results: Sequence[tuple[torch.Tensor, LossSums]]) -> tuple[float, LossSums]:
        """Sum loss and statistics over micro-batches and data ranks, on every pipeline stage. Collective."""
        totals = None
        if micro_results:
            losses = torch.stack([loss for loss, _ in micro_results]).sum()
            sums = torch.stack([part.sums for _, part in micro_results]).sum(0)
            sums = sum_over_data_ranks(torch.cat((losses[None], sums)))
            peak = max_over_data_ranks(torch.stack([part.peak for _, part in micro_results]).max())
            totals = torch.cat((sums, peak[None]))
        totals = self.ranks.from_last_stage(totals)
        return totals[0].item(), LossSums(totals[1:-1], totals[-1])

    def logprobs(self, packed: MicroBatch) -> torch.Tensor:
        """[trained tokens] the current logprob of those that this rank predicts, in the order of the rows."""
        logp = forward(self.model, [packed])
        return self.ranks.from_last_stage(logp[0] if logp else None)[packed.branches]

    def best(self, packed: MicroBatch) -> torch.Tensor:
        """[trained tokens] the token that the model would choose in place of each of them."""
        choices = forward(self.model, [packed], self.model.best)
        return self.ranks.from_last_stage(choices[0] if choices else None)[packed.branches]


def _added(updates: Sequence[Update], tokens: Sequence[int], taken: Sequence[Update]) -> Update:
    """What an epoch's updates did together, each token counted once.

    `tokens`: of each update. `taken`: all updates of the step; the norm is the largest of theirs.
    """
    sums = [update.sums for update in updates if update.sums is not None]
    return Update(
        loss=sum(update.loss * count for update, count in zip(updates, tokens, strict=True)) / sum(tokens),
        grad_norm=max(update.grad_norm for update in taken),
        learning_rate=taken[-1].learning_rate,
        sums=LossSums(
            torch.stack([part.sums for part in sums]).sum(0), torch.stack([part.peak for part in sums]).max()
        ),
        drafts=taken[-1].drafts,
        loss_inputs=[inputs for update in updates for inputs in update.loss_inputs],
        later=taken,
    )
