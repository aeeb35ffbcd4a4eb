"""Micro-batches: which rows go to which rank and together, and what the model gets of them.

Rows that begin alike stay together as trees, as far as the token budget lets them; trees go to the rank with the least
to do, by the cost of their linear layers and their attention. Left out: the trees themselves (trainer/tree.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.loss import Tokens
from trainer.packed import Packed
from trainer.rows import Row
from trainer.shape import Shape
from trainer.tree import Order, Run, build, cut, order

KEY_COST = 1e-4
"""Cost of one attended key relative to that of one token's linear layers, where the model is not known."""


@dataclass(frozen=True)
class Piece:
    """Rows that are computed together."""

    rows: list[Row]
    tokens: int
    """Distinct ones."""
    cost: float


def key_cost(shape: Shape) -> float:
    """FLOPs of one query and key in attention over those of one token in the linear layers of the same layer."""
    width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear = 2 * shape.hidden * (2 * width + 2 * keys + 3 * shape.ffn)
    return 4 * width / linear


def plan(rows: Sequence[Row], ranks: int, max_tokens: int, per_key: float = KEY_COST) -> list[list[list[Row]]]:
    """[rank][micro-batch] -> rows. Deterministic; every rank gets the same number of micro-batches, some maybe empty.

    Costliest trees first, each to the rank with the least work, then into the first micro-batch with room. Raises
    UserError for a row that is longer than `max_tokens`.
    """
    pieces = sorted(divide([row for row in rows if row.inputs], max_tokens, per_key), key=lambda piece: -piece.cost)
    loads = [0.0] * ranks
    bins: list[list[list[Piece]]] = [[] for _ in range(ranks)]
    for piece in pieces:
        rank = loads.index(min(loads))
        loads[rank] += piece.cost
        _place(bins[rank], piece, max_tokens)
    count = max(1, *(len(mine) for mine in bins))
    return [
        [[row for piece in micro for row in piece.rows] for micro in mine] + [[] for _ in range(count - len(mine))]
        for mine in bins
    ]


def divide(rows: Sequence[Row], max_tokens: int, per_key: float = KEY_COST) -> list[Piece]:
    """The trees of these rows, those over the budget cut into parts."""
    found = order(rows)
    starts = [index for index, shared in enumerate(found.shared) if not shared]
    pieces = []
    for start, end in zip(starts, [*starts[1:], len(found.rows)], strict=True):
        tree = Order(found.rows[start:end], found.shared[start:end])
        pieces += [_piece(part, per_key) for part in cut(tree, max_tokens)]
    return pieces


def _piece(part: Order, per_key: float) -> Piece:
    spans = [(row.inputs, shared) for row, shared in zip(part.rows, part.shared, strict=True)]
    keys = sum(length * (length + 1) - shared * (shared + 1) for length, shared in spans) / 2
    tokens = sum(length - shared for length, shared in spans)
    return Piece(part.rows, tokens, tokens + per_key * keys)


def _place(bins: list[list[Piece]], piece: Piece, max_tokens: int) -> None:
    for micro in bins:
        if sum(other.tokens for other in micro) + piece.tokens <= max_tokens:
            micro.append(piece)
            return
    bins.append([piece])


def pack(rows: Sequence[Row], device: torch.device, merge: bool = True) -> tuple[Packed, Tokens]:
    """One micro-batch as tensors: what the model computes, and what the loss needs of each trained token.

    `merge=False` computes each row by itself; loss and gradient are the same.
    """
    if not rows:
        return _empty(device)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    def flat(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        return tensor(np.concatenate([values[row.places] for values, row in zip(arrays, rows, strict=True)]))

    tree = build(rows, merge)
    packed = Packed(
        tokens=tensor(tree.tokens),
        positions=tensor(tree.positions),
        runs=tuple(tree.runs),
        rows=tensor(tree.parents),
        labels=tensor(tree.labels),
        branches=tensor(tree.edges),
    )
    starts = np.cumsum([0] + [int(row.segment.max()) + 1 for row in rows])
    logp = flat([row.rollout_logp for row in rows])
    return packed, Tokens(
        rollout_logp=logp,
        advantage=flat([row.advantage for row in rows]),
        mask=torch.ones_like(logp),
        scale=tensor(np.concatenate([np.full(len(row.places), row.weight, dtype=np.float32) for row in rows])),
        segment=flat([row.segment + start for row, start in zip(rows, starts, strict=False)]),
    )


def _empty(device: torch.device) -> tuple[Packed, Tokens]:
    """A micro-batch without a loss, so that every rank takes part in every collective."""
    one, none = torch.zeros(1, dtype=torch.long, device=device), torch.zeros(0, dtype=torch.long, device=device)
    nothing = torch.zeros(0, device=device)
    tokens = Tokens(rollout_logp=nothing, advantage=nothing, mask=nothing, scale=nothing, segment=none)
    return Packed(one, one, (Run(0, 1, 1, 0),), none, none, none), tokens
