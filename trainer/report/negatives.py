"""How much of the gradient comes from negative advantages, measured: one pass for each sign, before the update.

Norms do not add up, so that the share is |g-| / (|g+| + |g-|), with g+ + g- = g. Left out: the KL term and the penalty
of a rule, which are of neither sign. The weights and the update that follows stay as they are.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from trainer.data.packing import pack
from trainer.data.row import Row
from trainer.loss.policy_loss import LossRule, LossTokens, policy_loss
from trainer.megatron.optimizer import sum_gradients
from trainer.megatron.schedule import forward_backward
from trainer.policy import Policy


def gradient_shares(
    policy: Policy, micros: Sequence[Sequence[Row]], denominator: int, rule: LossRule
) -> dict[str, float]:
    """The norms of both signs' gradients and the negatives' share. Collective; empty where nothing is trained."""
    if denominator == 0:
        return {}
    pure = replace(rule, kl=0.0, penalty=0.0)
    positive, negative = (
        _norm(policy, micros, denominator, partial(_one_sign, rule=pure, sign=sign)) for sign in (1, -1)
    )
    if policy.model.replay_counter is not None:
        policy.model.replay_counter.metrics()  # begins anew: the step's counts are those of its update
    share = {"negative_gradient_share": negative / (positive + negative)} if positive + negative else {}
    return {"positive_gradient_norm": positive, "negative_gradient_norm": negative} | share


def _one_sign(logp: Tensor, tokens: LossTokens, rule: LossRule, sign: int) -> Tensor:
    """The loss of the tokens whose advantage has this sign."""
    kept = tokens.advantage * sign > 0
    only = replace(tokens, advantage=torch.where(kept, tokens.advantage, 0.0), old_logp=logp.detach())
    return policy_loss(logp, only, rule)[0]


def _norm(policy: Policy, micros: Sequence[Sequence[Row]], denominator: int, loss_of: "partial[Tensor]") -> float:
    policy.ddp.zero_grad_buffer()
    policy.optimizer.zero_grad()
    parts = [pack(rows, policy.share) for rows in micros]

    def loss(number: int, edges: Tensor) -> tuple[Tensor, None]:
        packed, tokens = parts[number]
        return loss_of(edges[packed.branches], tokens) / denominator, None

    forward_backward(policy.ddp, [packed for packed, _ in parts], loss)
    sum_gradients(policy.ddp)
    policy.optimizer.prepare_grads()
    return float(policy.optimizer.get_grad_norm())
