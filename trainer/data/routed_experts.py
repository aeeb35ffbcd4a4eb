"""The experts that the engine chose for each token of a path, read from the completions along it, for routers to
replay.

Routing replay (R3, arXiv 2510.11370): the trainer computes with the engine's experts. Otherwise, where a router is
undecided between two experts, the two may differ, and the token's ratio is noise. Where nothing was recorded (UNKNOWN),
the trainer's router chooses. Left out: the replay itself (trainer/megatron/replay.py).
"""

from collections.abc import Sequence

import numpy as np

from proxy.pool.completions.records import Completion
from proxy.pool.completions.routed_experts import RoutedExperts as Stored
from proxy.pool.errors import UserError
from trainer.config import Loss
from trainer.config.model_shape import ExpertShape, ModelShape
from trainer.data.row import TrainingRow

UNKNOWN = -1
"""The experts of this token and layer were not recorded."""
PADDING = -2
"""There is no token here."""
LARGEST = np.iinfo(np.int16).max


def replayed(loss: Loss, shape: ModelShape) -> ExpertShape | None:
    """The model whose recorded experts are replayed; None when routers choose. UserError for a dense model."""
    if loss.routing == "own":
        return None
    if shape.experts is None:
        raise UserError(
            f"loss.routing = replay needs a mixture of experts, and {shape.family} is a dense model; set it to own"
        )
    return shape.experts


def demand_recorded(rows: Sequence[TrainingRow]) -> None:
    """Raise UserError when these rows have no recorded experts at all. Single missing ones are counted, not refused."""
    if rows and not any(row.experts is not None and (row.experts != UNKNOWN).any() for row in rows):
        raise UserError(
            f"loss.routing = replay, and none of the step's {len(rows)} sequences has recorded experts; set "
            "engine.routed_experts = true for the proxy, or loss.routing = own until newer ones are trained"
        )


class RecordedExperts:
    """The experts along the paths of one attempt's completions. `mixture`: the model that is to replay them."""

    def __init__(self, chain: Sequence[Completion], mixture: ExpertShape):
        self._items = {item.id: item for item in chain}
        self._mixture = mixture

    def along(self, id: int) -> np.ndarray:
        """[tokens of the path, layers, experts per token] int16. The experts of a token are in rising order.

        UNKNOWN where nothing was recorded, and for the last token always. UserError for experts of another model.
        """
        item: Completion | None = self._items[id]
        assert item is not None
        mixture, end = self._mixture, item.prompt_length + len(item.sampled)
        experts = np.full((end, len(mixture.layers), mixture.per_token), UNKNOWN, dtype=np.int16)
        while item is not None:
            if item.experts is not None and item.experts.start < end:
                place = slice(item.experts.start, min(end, item.experts.end))
                experts[place] = self._read(item.id, item.experts)[: place.stop - place.start]
                end = place.start
            end = min(end, item.prefix_length)
            item = self._items.get(item.prefix_of) if item.prefix_of is not None else None
        experts.sort(axis=-1)  # the engine's order has no meaning
        impossible = (experts[..., 1:] == experts[..., :-1]).any(axis=-1)  # no router chooses an expert twice
        experts[impossible] = UNKNOWN
        return experts

    def continues(self, id: int, before: int, length: int) -> bool:
        """Whether the first `length` tokens have the same experts along the path of `id` as along that of `before`."""
        item = self._items.get(id)
        while item is not None and item.id != before:
            own = length if item.experts is None else item.experts.start
            if min(item.prefix_length, own) < length - 1:  # `before` has none for its last token
                return False
            item = self._items.get(item.prefix_of) if item.prefix_of is not None else None
        return item is not None

    def _read(self, id: int, stored: Stored) -> np.ndarray:
        """The stored experts of one completion as an array. UserError for experts of another model."""
        mixture = self._mixture
        shape, expected = (stored.layers, stored.top_k), (len(mixture.layers), mixture.per_token)
        kind = np.dtype("<u1" if stored.width == 1 else "<u2")
        numbers = np.frombuffer(stored.ids, kind)
        largest = int(numbers.max(initial=0))
        if shape != expected or largest >= min(mixture.count, LARGEST):
            raise UserError(
                f"completion {id} has experts up to {largest} in {shape[0]} layers, {shape[1]} for a token, and the "
                f"model has {mixture.count} in {expected[0]}, {expected[1]} for a token; train the model that "
                "was sampled"
            )
        return numbers.reshape(-1, *shape)
