"""Routing replay: routers take the experts that the engine chose, and it is counted how often they would not have.

The choice alone is replaced (R3, arXiv 2510.11370). The weights of the chosen experts are made of the trainer's own
scores, so that routers learn by them. Left out: the model of `loss.kl`, whose routers always choose.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from trainer.data.routed_experts import PADDING


class ReplayCounter:
    """Counts choices over the micro-batches of a step: one of every token in every layer with experts."""

    def __init__(self, device: torch.device):
        self._counts = torch.zeros(3, dtype=torch.long, device=device)

    def add(self, recorded: Tensor, known: Tensor, otherwise: Tensor) -> None:
        """[tokens, experts per token] of a layer, which tokens are replayed, and where the router chose otherwise."""
        told = torch.stack(((recorded[:, 0] != PADDING).sum(), known.sum(), (known & otherwise).sum()))
        self._counts += told

    def metrics(self) -> dict[str, float]:
        """Of all ranks, since the last time; every rank must ask.

        `routing_replayed`: the share of choices that were recorded. `routing_mismatches`: how many of these the trainer
        would not have made, and `routing_mismatch`, their share.
        """
        dist.all_reduce(self._counts)
        tokens, known, otherwise = self._counts.tolist()
        self._counts.zero_()
        shares = {"routing_replayed": known / max(1, tokens), "routing_mismatch": otherwise / max(1, known)}
        return shares | {"routing_mismatches": otherwise}


class RoutingReplay:
    """What is replayed in one micro-batch. `recorded`: [tokens, layers, experts per token] of this context rank.

    All passes over a micro-batch share it, so that what is computed again in the backward pass is counted once.
    """

    def __init__(self, recorded: Tensor, counter: ReplayCounter):
        self._recorded, self._counter = recorded, counter
        self._counted: set[int] = set()

    def replayed(self, layer: int, own: Tensor) -> Tensor:
        """The experts to take where the router of a layer (from 0) chose `own`: [tokens of this rank, per token]."""
        recorded = self._recorded[:, layer]
        if len(recorded) != len(own):  # tensor ranks divide the tokens (parallel.sequence)
            recorded = recorded.split(len(own))[parallel_state.get_tensor_model_parallel_rank()]
        recorded = recorded.long()
        known = recorded[:, 0] >= 0
        if layer not in self._counted:
            self._counted.add(layer)
            self._counter.add(recorded, known, (own.sort(dim=-1).values != recorded).any(dim=-1))
        return torch.where(known[:, None], recorded, own)
