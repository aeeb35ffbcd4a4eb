"""Which experts the engine chose for each token of a path, joined from the rows that hold it, for the router to replay.

Routing replay (R3, arXiv 2510.11370): train and inference compute the same experts, so that a router that lies between
two of them does not make a token's ratio noise. What was not recorded is UNKNOWN, and the trainer's router chooses
there itself. Left out: the choice itself (trainer/megatron/replay.py).
"""

from collections.abc import Sequence

import numpy as np

from proxy.pool.completions.records import Completion
from proxy.pool.completions.routed_experts import Experts as Stored
from proxy.pool.errors import UserError
from trainer.config import Loss
from trainer.config.model_shape import Experts, Shape
from trainer.data.row import Row

UNKNOWN = -1
"""Nobody recorded the experts of this token and layer."""
PADDING = -2
"""There is no such token."""
LARGEST = np.iinfo(np.int16).max


def replayed(loss: Loss, shape: Shape) -> Experts | None:
    """The mixture whose recorded choices are replayed; None when routers choose. UserError for a dense model."""
    if loss.routing == "own":
        return None
    if shape.experts is None:
        raise UserError(f"loss.routing = replay needs a mixture of experts, and {shape.family} is none; set it to own")
    return shape.experts


def demand_recorded(rows: Sequence[Row]) -> None:
    """UserError when not one choice of these rows was recorded. That some are missing is counted, not refused."""
    if rows and not any(row.experts is not None and (row.experts != UNKNOWN).any() for row in rows):
        raise UserError(
            f"loss.routing = replay, and none of the step's {len(rows)} sequences has recorded experts; set "
            "engine.routed_experts = true for the proxy, or loss.routing = own until newer ones are trained"
        )


class Recorded:
    """The choices along the paths of one attempt's completions. `mixture`: the model that is to replay them."""

    def __init__(self, chain: Sequence[Completion], mixture: Experts):
        self._items = {item.id: item for item in chain}
        self._mixture = mixture

    def along(self, id: int) -> np.ndarray:
        """[tokens of the path, layers, experts per token] int16, the experts of a token in rising order.

        UNKNOWN where nothing was recorded, of the last token always. UserError for choices of another model.
        """
        item: Completion | None = self._items[id]
        assert item is not None
        mixture, end = self._mixture, item.prompt_length + len(item.sampled)
        found = np.full((end, len(mixture.layers), mixture.per_token), UNKNOWN, dtype=np.int16)
        while item is not None:
            if item.experts is not None and item.experts.start < end:
                place = slice(item.experts.start, min(end, item.experts.end))
                found[place] = self._read(item.id, item.experts)[: place.stop - place.start]
                end = place.start
            end = min(end, item.prefix_length)
            item = self._items.get(item.prefix_of) if item.prefix_of is not None else None
        return _cleared(found)

    def goes_on(self, id: int, before: int, length: int) -> bool:
        """Whether the choices along the path of `id` are, for its first `length` tokens, those along `before`."""
        item = self._items.get(id)
        while item is not None and item.id != before:
            own = length if item.experts is None else item.experts.start
            if min(item.prefix_length, own) < length - 1:  # of the last one of them, `before` has none
                return False
            item = self._items.get(item.prefix_of) if item.prefix_of is not None else None
        return item is not None

    def _read(self, id: int, stored: Stored) -> np.ndarray:
        mixture = self._mixture
        shape, wanted = (stored.layers, stored.top_k), (len(mixture.layers), mixture.per_token)
        kind = np.dtype("<u1" if stored.width == 1 else "<u2")
        numbers = np.frombuffer(stored.ids, kind)
        largest = int(numbers.max(initial=0))
        if shape != wanted or largest >= min(mixture.count, LARGEST):
            raise UserError(
                f"completion {id} has experts up to {largest} in {shape[0]} layers, {shape[1]} for a token, and the "
                f"model has {mixture.count} in {wanted[0]}, {wanted[1]} for a token; train the model that was sampled"
            )
        return numbers.reshape(-1, *shape)


def _cleared(found: np.ndarray) -> np.ndarray:
    """In rising order, as it does not matter in which the engine named them. An expert named twice was not chosen."""
    found.sort(axis=-1)
    impossible = (found[..., 1:] == found[..., :-1]).any(axis=-1)
    found[impossible] = UNKNOWN
    return found
