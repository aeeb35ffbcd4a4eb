"""The loss of multi-token-prediction heads, which tokens it is taken at, and its statistics, as pure functions.

A head drafts the tokens after the next one, so that the engine can verify several tokens in one pass. While training
changes the policy, the head has to follow it: its loss is the KL divergence from the policy's distribution to the
head's, over the policy's K likeliest tokens and one bucket for all others. Left out: the head itself
(trainer/megatron/mtp/head.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.data.row import TrainingRow
from trainer.data.tree import TokenRun


class VocabularyShards(Protocol):
    """A vocabulary that is divided over ranks, each with an equal part of every row of logits."""

    rank: int
    world: int

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks; the gradient goes back to each rank's own part."""

    def max(self, values: Tensor) -> Tensor:
        """Take the maximum over the ranks, without a gradient."""

    def gather(self, values: Tensor) -> Tensor:
        """Put the ranks' values side by side in the last dimension, without a gradient."""


class WholeVocabulary:
    """The vocabulary on one rank."""

    rank, world = 0, 1

    def sum(self, values: Tensor) -> Tensor:
        return values

    max = gather = sum


WHOLE_VOCABULARY = WholeVocabulary()


def tail_kl(teacher: Tensor, student: Tensor, k: int, shards: VocabularyShards = WHOLE_VOCABULARY) -> Tensor:
    """[rows] KL(p || q) in nats, over the teacher's `k` likeliest tokens S and one bucket for the rest.

    `teacher` and `student`: [rows, vocabulary of this rank] logits. No gradient reaches the teacher.
    MiniMax-M2 (arXiv 2605.26494) trains its heads by a top-K KL without giving its form. Here

        sum_S p_v log(p_v / q_v) + (1 - P_S) log((1 - P_S) / (1 - Q_S))

    with p and q softmaxes over the whole vocabulary, and P_S and Q_S their sums over S. It is a divergence on a coarser
    space: never negative, never above the full one, and equal to it when `k` is the vocabulary. Its gradient is

        d / d z_v = q_v - p_v on S, and q_v (1 - (1 - P_S) / (1 - Q_S)) off S

    so tokens outside of S learn too, which renormalising p and q on S would leave out.
    """
    teacher = teacher.detach()
    k = min(k, teacher.shape[-1] * shards.world)
    chosen, is_local = _likeliest(teacher, k, shards)
    p_all, q_all = _log_sum(teacher, shards), _log_sum(student, shards)
    p, q = (
        shards.sum(torch.where(is_local, logits.gather(-1, chosen), 0.0)) - total[:, None]
        for logits, total in ((teacher, p_all), (student, q_all))
    )
    divergence = (p.exp() * (p - q)).sum(-1)
    if k == teacher.shape[-1] * shards.world:
        return divergence
    # sum the rest directly: 1 - Q_S would lose all digits where the rest is small
    chosen_here = torch.zeros_like(teacher, dtype=torch.long).scatter_add(-1, chosen, is_local.long()) > 0
    p_rest, q_rest = (
        _log_sum(logits.masked_fill(chosen_here, -torch.inf), shards) - total
        for logits, total in ((teacher, p_all), (student, q_all))
    )
    return divergence + p_rest.exp() * (p_rest - q_rest)


def _likeliest(logits: Tensor, k: int, shards: VocabularyShards) -> tuple[Tensor, Tensor]:
    """Return the globally likeliest tokens: [rows, k] their index on this rank, [rows, k] whether they are there."""
    size = logits.shape[-1]
    values, indices = logits.topk(min(k, size), dim=-1)
    best = shards.gather(values).topk(k, dim=-1).indices
    local = best - shards.rank * values.shape[-1]
    is_local = (local >= 0) & (local < values.shape[-1])
    return indices.gather(-1, local.clamp(0, values.shape[-1] - 1)), is_local


def _log_sum(logits: Tensor, shards: VocabularyShards) -> Tensor:
    """[rows] log sum_v exp(z_v) over all ranks. Each row needs at least one finite logit."""
    peak = shards.max(logits.detach().amax(-1))
    return peak + shards.sum((logits - peak[:, None]).exp().sum(-1)).log()


@torch.no_grad()
def acceptance(teacher: Tensor, student: Tensor, shards: VocabularyShards = WHOLE_VOCABULARY) -> Tensor:
    """[rows] the probability that a token drawn from the student is accepted: sum_v min(p_v, q_v).

    That is 1 minus the total variation. `teacher` and `student`: [rows, vocabulary of this rank] logits. Speculative
    sampling accepts v with probability min(1, p_v / q_v) (Leviathan et al., arXiv 2211.17192, corollary 3.6). At least
    1 - sqrt(KL / 2) by Pinsker's inequality.
    """
    p, q = ((logits - _log_sum(logits, shards)[:, None]).exp() for logits in (teacher, student))
    return shards.sum(torch.minimum(p, q).sum(-1))


def expected_length(accepted: Sequence[float]) -> float:
    """Expected tokens per verification: 1 + a_1 + a_1 a_2 + ...

    `accepted` has a_d, the probability that draft d is accepted if those before it were. With g equal ones, the sum is
    (1 - a^(g + 1)) / (1 - a) (arXiv 2211.17192, equation 1). The first token is the policy's own. An estimate: the a_d
    are means over all tokens, and the formula takes acceptances as independent.
    """
    return 1.0 + sum(accumulate(accepted, lambda chance, next_one: chance * next_one))


def draft_targets(trained: np.ndarray, depth: int) -> np.ndarray:
    """[tokens] whether each token is a target of draft `depth`: it and the `depth` tokens before it were sampled.

    The engine drafts after a token that it has just sampled itself; prompts and tool outputs are never drafted.
    `trained`: [tokens] bool, whether each was sampled.
    """
    targets = trained.copy()
    for back in range(1, depth + 1):
        targets[back:] &= trained[:-back]
        targets[:back] = False
    return targets


def trained_draft_targets(rows: Sequence[TrainingRow], depth: int) -> np.ndarray:
    """[trained tokens of the rows, concatenated] whether each is a target of draft `depth`."""
    return np.concatenate([draft_targets(row.trained, depth)[row.places] for row in rows] or [np.zeros(0, dtype=bool)])


def parents(runs: Sequence[TokenRun]) -> np.ndarray:
    """[tokens] the index of the token before each one, along its branch. A tree's first token has its own index."""
    before = np.arange(-1, runs[-1].end - 1)
    path: list[TokenRun] = []
    for run in runs:
        while path and path[-1].last <= run.start:
            path.pop()
        before[run.start] = path[-1].end - 1 if path else run.start
        path.append(run)
    return before


def without_first_tokens(runs: Sequence[TokenRun], depth: int) -> tuple[TokenRun, ...]:
    """The runs of the same trees without their first `depth` tokens.

    The indices of all tokens stay; each token that is left out attends to itself alone.
    """
    shortened = []
    for run in runs:
        start = min(run.end, run.start + max(0, depth - run.depth))
        shortened += [TokenRun(at, at + 1, at + 1, 0) for at in range(run.start, start)]
        if start < run.end:
            shortened.append(TokenRun(start, run.end, run.last, run.depth + start - run.start))
    return tuple(shortened)


@dataclass(frozen=True)
class DraftMetrics:
    """How well the head drafted in a step: means over the tokens where each draft is used."""

    loss: float
    grad_norm: float
    accepted: tuple[float, ...]
    """The acceptance probability of draft 1, 2, ..."""

    @property
    def length(self) -> float:
        """Expected tokens per verification (`expected_length`)."""
        return expected_length(self.accepted)

    def metrics(self) -> dict[str, float]:
        """The metrics of a step by their names."""
        each = {f"mtp_acceptance_{depth}": value for depth, value in enumerate(self.accepted, 1)}
        return {"mtp_loss": self.loss, "mtp_grad_norm": self.grad_norm, "mtp_length": self.length} | each
