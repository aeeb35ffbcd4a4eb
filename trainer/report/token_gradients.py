"""What a step's loss gave each trained token, as seen while it was computed.

Coefficients (`Notes`) are read off the loss's own gradient, so that they hold for every rule.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from trainer.data.packing import ContextShard, predicted
from trainer.data.row import Row
from trainer.loss.policy_loss import LossSums, LossTokens
from trainer.megatron.parallel import Ranks
from trainer.policy import LossOf
from trainer.report.tokens import Notes

Seen = list[tuple[np.ndarray, np.ndarray]]
"""Of each micro-batch of a rank, in order: logprobs and coefficients of the trained tokens that it computed."""


class Watched:
    """A loss that notes what it gives each token. The loss and its gradient stay as they are."""

    def __init__(self, loss_of: LossOf):
        self._loss_of = loss_of
        self.seen: Seen = []

    def __call__(self, logp: Tensor, tokens: LossTokens) -> tuple[Tensor, LossSums]:
        loss, said = self._loss_of(logp, tokens)
        [pull] = torch.autograd.grad(loss, logp, retain_graph=True)
        self.seen.append((logp.detach().float().cpu().numpy(), -pull.float().cpu().numpy()))
        return loss, said

    def collect(self, micros: Sequence[Sequence[Sequence[Row]]], ranks: Ranks, share: ContextShard) -> dict[int, Notes]:
        """The notes of every row by its id(), on rank 0; nothing on the others. Collective.

        `micros`: [data rank][micro-batch] -> rows, as the step computed them; `share`: this rank's part of one.
        """
        mine = (ranks.data_rank, ranks.context_rank, self.seen if _speaks() else [])
        every: list[tuple[int, int, Seen]] | None = [mine] * ranks.world if ranks.rank == 0 else None
        dist.gather_object(mine, every, dst=0, group=ranks.control)
        found: dict[int, Notes] = {}
        by_place = {(data, context): seen for data, context, seen in every or [] if seen}
        for rank, rows_of_rank in enumerate(micros):
            parts = {context: seen for (data, context), seen in by_place.items() if data == rank}
            for number, rows in enumerate(rows_of_rank if parts else []):
                found |= _divided(rows, {context: seen[number] for context, seen in parts.items()}, share)
        return found


def _speaks() -> bool:
    """Whether this rank has what no other has: tensor ranks all hold the same logprobs."""
    return parallel_state.get_tensor_model_parallel_rank() == 0


def _divided(
    rows: Sequence[Row], parts: dict[int, tuple[np.ndarray, np.ndarray]], share: ContextShard
) -> dict[int, Notes]:
    """A micro-batch's notes by row, from those of the context ranks that shared it."""
    if not rows:
        return {}
    counts = [len(row.places) for row in rows]
    logp, coefficient = np.zeros((2, sum(counts)), dtype=np.float32)
    for context, seen in parts.items():
        where = predicted(rows, replace(share, rank=context)) if share.world > 1 else slice(None)
        logp[where], coefficient[where] = seen
    ends = np.cumsum(counts)[:-1]
    pairs = zip(rows, np.split(logp, ends), np.split(coefficient, ends), strict=True)
    return {id(row): Notes(*values) for row, *values in pairs}
