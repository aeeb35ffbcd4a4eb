"""Routing replay: routers use the experts that the engine chose, and a counter says how often they would not have.

Only the choice is replaced (R3, arXiv 2510.11370). The weights of the chosen experts come from the trainer's own
scores, so that routers keep learning. The reference model of `loss.kl` replays them too.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from trainer.data.routed_experts import PADDING


class ReplayCounter:
    """Counts choices over the micro-batches of a step: one for each token in each layer with experts."""

    def __init__(self, device: torch.device):
        self._counts = torch.zeros(3, dtype=torch.long, device=device)

    def add(self, recorded: Tensor, known: Tensor, otherwise: Tensor) -> None:
        """Count one layer of one micro-batch.

        `recorded` [tokens, experts per token]; `known` [tokens] whether the token is replayed; `otherwise` [tokens]
        whether the router chose other experts.
        """
        self._counts += torch.stack(((recorded[:, 0] != PADDING).sum(), known.sum(), (known & otherwise).sum()))

    def metrics(self) -> dict[str, float]:
        """The counts of all ranks since the last call. Collective; sets the counts back to zero.

        `routing_replayed`: the share of choices that were recorded. `routing_mismatches`: how many of these the trainer
        would not have made; `routing_mismatch`: their share.
        """
        dist.all_reduce(self._counts)
        tokens, known, otherwise = self._counts.tolist()
        self._counts.zero_()
        shares = {"routing_replayed": known / max(1, tokens), "routing_mismatch": otherwise / max(1, known)}
        return shares | {"routing_mismatches": otherwise}


class RoutingReplay:
    """The recorded experts of one micro-batch. `recorded`: [tokens of this context rank, layers, experts per token].

    All passes over a micro-batch share one object, so that layers that are computed again in the backward pass are
    counted once.
    """

    def __init__(self, recorded: Tensor, counter: ReplayCounter):
        self._recorded, self._counter = recorded, counter
        self._counted: set[int] = set()

    def replayed(self, layer: int, own: Tensor) -> Tensor:
        """[tokens of this rank, experts per token] the experts to use in a layer, where its router chose `own`.

        `layer` counts from 0. Tokens without recorded experts keep the router's choice.
        """
        recorded = self._recorded[:, layer]
        if len(recorded) != len(own):  # tensor ranks divide the tokens
            recorded = recorded.split(len(own))[parallel_state.get_tensor_model_parallel_rank()]
        recorded = recorded.long()
        known = recorded[:, 0] >= 0
        if layer not in self._counted:
            self._counted.add(layer)
            self._counter.add(recorded, known, (own.sort(dim=-1).values != recorded).any(dim=-1))
        return torch.where(known[:, None], recorded, own)
