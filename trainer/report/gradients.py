"""Gradients that only statistics need: of each token's logprob, and of the weights for each sign of the advantage.

Both are further passes, started here and never by an update; the weights and the update stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data.packing import ContextShard, pack, predicted
from trainer.data.row import TrainingRow
from trainer.loss.policy_loss import LossRule, policy_loss
from trainer.megatron.optimizer import sum_gradients
from trainer.megatron.parallel import Ranks
from trainer.megatron.schedule import forward_backward
from trainer.policy import LossFunction, LossInput, Policy
from trainer.report.tokens import TokenNotes

TokenArrays = tuple[np.ndarray, np.ndarray]
"""Logprobs before the step, and coefficients, of the trained tokens of a micro-batch that a rank computed."""


def token_arrays(inputs: LossInput, loss_function: LossFunction) -> TokenArrays:
    """Differentiate the loss of one micro-batch by each token's logprob.

    That is read off the loss itself, so it holds for every rule. Costs the loss arithmetic again, not the model."""
    logp = inputs.logp.detach().requires_grad_()
    loss, _ = loss_function(logp, inputs.tokens)
    [gradient] = torch.autograd.grad(loss, logp)
    old = logp.detach() if inputs.tokens.old_logp is None else inputs.tokens.old_logp
    return old.float().cpu().numpy(), -gradient.float().cpu().numpy()


def token_notes(
    loss_inputs: Sequence[LossInput],
    loss_function: LossFunction,
    micros: Sequence[Sequence[Sequence[TrainingRow]]],
    ranks: Ranks,
    shard: ContextShard,
) -> dict[int, TokenNotes]:
    """What the loss gave each trained token of every row, by the row's id(). Collective; empty on all ranks but 0.

    `micros`: [data rank][micro-batch] -> rows, as the step computed them; `shard`: this rank's part of one.
    """
    # Tensor ranks all hold the same logprobs, so one of them is enough.
    arrays = [token_arrays(inputs, loss_function) for inputs in loss_inputs] if ranks.tensor_rank == 0 else []
    mine = (ranks.data_rank, ranks.context_rank, arrays)
    gathered: list[tuple[int, int, list[TokenArrays]]] | None = [mine] * ranks.world if ranks.rank == 0 else None
    dist.gather_object(mine, gathered, dst=0, group=ranks.control)
    notes: dict[int, TokenNotes] = {}
    by_place = {(data, context): arrays for data, context, arrays in gathered or [] if arrays}
    for rank, rows_of_rank in enumerate(micros):
        parts = {context: arrays for (data, context), arrays in by_place.items() if data == rank}
        for number, rows in enumerate(rows_of_rank if parts else []):
            notes |= _notes_by_row(rows, {context: arrays[number] for context, arrays in parts.items()}, shard)
    return notes


def _notes_by_row(
    rows: Sequence[TrainingRow], parts: Mapping[int, TokenArrays], shard: ContextShard
) -> dict[int, TokenNotes]:
    """Join what the context ranks computed of a micro-batch and divide it by row."""
    if not rows:
        return {}
    counts = [len(row.places) for row in rows]
    logp, coefficient = np.zeros((2, sum(counts)), dtype=np.float32)
    for context, arrays in parts.items():
        where = predicted(rows, replace(shard, rank=context)) if shard.world > 1 else slice(None)
        logp[where], coefficient[where] = arrays
    ends = np.cumsum(counts)[:-1]
    pairs = zip(rows, np.split(logp, ends), np.split(coefficient, ends), strict=True)
    return {id(row): TokenNotes(*values) for row, *values in pairs}


def gradient_shares(
    policy: Policy, micros: Sequence[Sequence[TrainingRow]], denominator: int, rule: LossRule
) -> dict[str, float]:
    """Measure how much of the weights' gradient comes from negative advantages: one pass for each sign. Collective.

    Norms do not add up, so the share is |g-| / (|g+| + |g-|), with g+ + g- = g. Terms that have neither sign take no
    part: the KL term, the rule's penalty and imitation. Empty where nothing is trained.
    """
    if denominator == 0:
        return {}
    pure = replace(rule, kl=0.0, penalty=0.0)
    positive, negative = (_gradient_norm(policy, micros, denominator, pure, sign) for sign in (1, -1))
    if policy.model.replay_counter is not None:
        # Reset the counts of replayed experts: the step reports those of its update.
        policy.model.replay_counter.metrics()
    share = {"negative_gradient_share": negative / (positive + negative)} if positive + negative else {}
    return {"positive_gradient_norm": positive, "negative_gradient_norm": negative} | share


def _gradient_norm(
    policy: Policy, micros: Sequence[Sequence[TrainingRow]], denominator: int, rule: LossRule, sign: int
) -> float:
    """The norm of the gradient of the tokens whose advantage has this sign."""
    policy.ddp.zero_grad_buffer()
    policy.optimizer.zero_grad()
    parts = [pack(rows, policy.shard) for rows in micros]

    def loss_of(number: int, edges: Tensor) -> tuple[Tensor, None]:
        packed, tokens = parts[number]
        logp = edges[packed.branches]
        advantage = torch.where(tokens.advantage * sign > 0, tokens.advantage, 0.0)
        loss, _ = policy_loss(logp, replace(tokens, advantage=advantage, old_logp=logp.detach(), imitated=None), rule)
        return loss / denominator, None

    forward_backward(policy.ddp, [packed for packed, _ in parts], loss_of)
    sum_gradients(policy.ddp)
    policy.optimizer.prepare_grads()
    return float(policy.optimizer.get_grad_norm())
