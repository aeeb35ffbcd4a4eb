"""What multi-token-prediction heads learn, as pure functions: their loss, where it is taken, what it says.

A head drafts the token after next, so that the engine can verify several tokens in one pass. While the policy moves the
heads have to follow it: their loss is the KL divergence from the policy's distribution to the head's, over the policy's
K likeliest tokens and one bucket for all others. Left out: the heads themselves (trainer/megatron/mtp/head.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.data.row import Row
from trainer.data.tree import TokenRun


class VocabularyShards(Protocol):
    """A vocabulary that is divided over ranks, each with an equal part of every row of logits."""

    rank: int
    world: int

    def sum(self, values: Tensor) -> Tensor:
        """Over the ranks; the gradient goes back to each rank's own part."""

    def max(self, values: Tensor) -> Tensor:
        """Over the ranks, without a gradient."""

    def gather(self, values: Tensor) -> Tensor:
        """The ranks' values side by side in the last dimension, without a gradient."""


class WholeVocabulary:
    """The vocabulary in one piece."""

    rank, world = 0, 1

    def sum(self, values: Tensor) -> Tensor:
        return values

    max = gather = sum


WHOLE_VOCABULARY = WholeVocabulary()


def tail_kl(teacher: Tensor, student: Tensor, k: int, shards: VocabularyShards = WHOLE_VOCABULARY) -> Tensor:
    """[rows] KL(p || q) over the teacher's `k` likeliest tokens S and one bucket for the rest.

    MiniMax-M2 (arXiv 2605.26494) trains its heads by a top-K KL without giving its form. Here
    sum_S p_v log(p_v / q_v) + (1 - P_S) log((1 - P_S) / (1 - Q_S)), with p and q softmaxes over the whole vocabulary:
    a divergence on a coarser space, so never negative and never above the full one, which it is when `k` is the
    vocabulary. d / d z_v = q_v - p_v on S and q_v (1 - (1 - P_S) / (1 - Q_S)) off it: also what lies outside S learns,
    which renormalising p and q on S would leave alone. `teacher` and `student` are [rows, vocabulary of this rank]; no
    gradient reaches the teacher.
    """
    teacher = teacher.detach()
    k = min(k, teacher.shape[-1] * shards.world)
    chosen, kept = _likeliest(teacher, k, shards)
    p_all, q_all = _log_sum(teacher, shards), _log_sum(student, shards)
    p, q = (
        shards.sum(torch.where(kept, logits.gather(-1, chosen), 0.0)) - total[:, None]
        for logits, total in ((teacher, p_all), (student, q_all))
    )
    found = (p.exp() * (p - q)).sum(-1)
    if k == teacher.shape[-1] * shards.world:
        return found
    # a sum over the rest itself: 1 - Q_S would lose all digits of a small one
    chosen_here = torch.zeros_like(teacher, dtype=torch.long).scatter_add(-1, chosen, kept.long()) > 0
    p_rest, q_rest = (
        _log_sum(logits.masked_fill(chosen_here, -torch.inf), shards) - total
        for logits, total in ((teacher, p_all), (student, q_all))
    )
    return found + p_rest.exp() * (p_rest - q_rest)


def _likeliest(logits: Tensor, k: int, shards: VocabularyShards) -> tuple[Tensor, Tensor]:
    """[rows, k] where each of the globally likeliest tokens is in this rank's part, and whether it is there at all."""
    size = logits.shape[-1]
    values, places = logits.topk(min(k, size), dim=-1)
    best = shards.gather(values).topk(k, dim=-1).indices
    local = best - shards.rank * values.shape[-1]
    kept = (local >= 0) & (local < values.shape[-1])
    return places.gather(-1, local.clamp(0, values.shape[-1] - 1)), kept


def _log_sum(logits: Tensor, shards: VocabularyShards) -> Tensor:
    """log sum_v exp(z_v) over all ranks, of rows with at least one finite entry."""
    peak = shards.max(logits.detach().amax(-1))
    return peak + shards.sum((logits - peak[:, None]).exp().sum(-1)).log()


@torch.no_grad()
def acceptance(teacher: Tensor, student: Tensor, shards: VocabularyShards = WHOLE_VOCABULARY) -> Tensor:
    """[rows] how likely a token drawn from the student is accepted: sum_v min(p_v, q_v), 1 minus the total variation.

    Speculative sampling accepts v with probability min(1, p_v / q_v) (Leviathan et al., arXiv 2211.17192, corollary
    3.6). At least 1 - sqrt(KL / 2) by Pinsker's inequality.
    """
    p, q = ((logits - _log_sum(logits, shards)[:, None]).exp() for logits in (teacher, student))
    return shards.sum(torch.minimum(p, q).sum(-1))


def expected_length(accepted: Sequence[float]) -> float:
    """Tokens of one verification: 1 + a_1 + a_1 a_2 + ..., where draft d is accepted with a_d if those before it were.

    With g equal ones it is (1 - a^(g + 1)) / (1 - a) (arXiv 2211.17192, equation 1). The first token is the policy's
    own. An estimate: the a_d are means over all places, and drafts are taken to be accepted independently.
    """
    return 1.0 + sum(accumulate(accepted, lambda chance, next_one: chance * next_one))


def drafted(trained: np.ndarray, depth: int) -> np.ndarray:
    """[tokens] whether each is the target of draft `depth`: it and the `depth` tokens before it were sampled.

    The engine drafts behind a token that it has just sampled itself: prompts and tool outputs are never drafted.
    """
    found = trained.copy()
    for back in range(1, depth + 1):
        found[back:] &= trained[:-back]
        found[:back] = False
    return found


def drafted_places(rows: Sequence[Row], depth: int) -> np.ndarray:
    """[trained tokens of the rows, flat] which of them are targets of draft `depth`."""
    return np.concatenate([drafted(row.trained, depth)[row.places] for row in rows] or [np.zeros(0, dtype=bool)])


def parents(runs: Sequence[TokenRun]) -> np.ndarray:
    """[tokens] where the token before each one is, along its branch; a tree's first token has itself."""
    found = np.arange(-1, runs[-1].end - 1)
    path: list[TokenRun] = []
    for run in runs:
        while path and path[-1].last <= run.start:
            path.pop()
        found[run.start] = path[-1].end - 1 if path else run.start
        path.append(run)
    return found


def from_depth(runs: Sequence[TokenRun], depth: int) -> tuple[TokenRun, ...]:
    """The same trees without their first `depth` tokens, whose places remain: each of them attends to itself alone."""
    kept = []
    for run in runs:
        start = min(run.end, run.start + max(0, depth - run.depth))
        kept += [TokenRun(at, at + 1, at + 1, 0) for at in range(run.start, start)]
        if start < run.end:
            kept.append(TokenRun(start, run.end, run.last, run.depth + start - run.start))
    return tuple(kept)


@dataclass(frozen=True)
class DraftMetrics:
    """How well the heads drafted in a step: means over the places where each is used."""

    loss: float
    grad_norm: float
    accepted: tuple[float, ...]
    """Of draft 1, 2, ...: how likely it is to be accepted."""

    @property
    def length(self) -> float:
        """Tokens that one verification is expected to give."""
        return expected_length(self.accepted)

    def metrics(self) -> dict[str, float]:
        """As a step reports them."""
        each = {f"mtp_acceptance_{depth}": value for depth, value in enumerate(self.accepted, 1)}
        return {"mtp_loss": self.loss, "mtp_grad_norm": self.grad_norm, "mtp_length": self.length} | each
