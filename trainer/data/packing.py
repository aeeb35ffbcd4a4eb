"""Micro-batches: which rows go to which rank and together, and what the model gets of them.

Rows that begin alike stay together as trees, as far as the token budget lets them; trees go to the rank with the least
to do, by the cost of their linear layers and their attention. Left out: the trees themselves (trainer/data/tree.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from trainer.config.model_shape import Shape
from trainer.data.micro_batch import MicroBatch, SequencePaths
from trainer.data.routed_experts import PADDING
from trainer.data.row import Row
from trainer.data.tree import PrefixForest, SortedRows, TokenRun, build, cut, order
from trainer.loss.policy_loss import LossTokens

KEY_COST = 1e-4
"""Cost of one attended key relative to that of one token's linear layers, where the model is not known."""


@dataclass(frozen=True)
class TreePart:
    """Rows that are computed together."""

    rows: list[Row]
    tokens: int
    """Distinct ones."""
    cost: float


def key_cost(shape: Shape) -> float:
    """FLOPs of one query and key in attention over those of one token in the linear layers of the same layer."""
    width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear = 2 * shape.hidden * (2 * width + 2 * keys + 3 * shape.token_ffn())
    return 4 * width / linear


def plan(rows: Sequence[Row], ranks: int, max_tokens: int, per_key: float = KEY_COST) -> list[list[list[Row]]]:
    """[rank][micro-batch] -> rows. Deterministic; every rank gets the same number of micro-batches, some maybe empty.

    Costliest trees first, each to the rank with the least work, then into the first micro-batch with room. Raises
    UserError for a row that is longer than `max_tokens`.
    """
    pieces = sorted(divide([row for row in rows if row.inputs], max_tokens, per_key), key=lambda piece: -piece.cost)
    loads = [0.0] * ranks
    bins: list[list[list[TreePart]]] = [[] for _ in range(ranks)]
    for piece in pieces:
        rank = loads.index(min(loads))
        loads[rank] += piece.cost
        _place(bins[rank], piece, max_tokens)
    count = max(1, *(len(mine) for mine in bins))
    return [
        [[row for piece in micro for row in piece.rows] for micro in mine] + [[] for _ in range(count - len(mine))]
        for mine in bins
    ]


def divide(rows: Sequence[Row], max_tokens: int, per_key: float = KEY_COST) -> list[TreePart]:
    """The trees of these rows, those over the budget cut into parts."""
    found = order(rows)
    ends = [index for index, shared in enumerate(found.shared) if not shared] + [len(found.rows)]
    pieces = []
    for start, end in pairwise(ends):
        tree = SortedRows(found.rows[start:end], found.shared[start:end])
        pieces += [_piece(part, per_key) for part in cut(tree, max_tokens)]
    return pieces


def _piece(part: SortedRows, per_key: float) -> TreePart:
    spans = [(row.inputs, shared) for row, shared in zip(part.rows, part.shared, strict=True)]
    keys = sum(length * (length + 1) - shared * (shared + 1) for length, shared in spans) / 2
    tokens = sum(length - shared for length, shared in spans)
    return TreePart(part.rows, tokens, tokens + per_key * keys)


def _place(bins: list[list[TreePart]], piece: TreePart, max_tokens: int) -> None:
    for micro in bins:
        if sum(other.tokens for other in micro) + piece.tokens <= max_tokens:
            micro.append(piece)
            return
    bins.append([piece])


@dataclass(frozen=True)
class ContextShard:
    """Which part of a micro-batch a rank computes."""

    device: torch.device
    rank: int = 0
    world: int = 1
    """Ranks that divide its tokens among them, in equal stretches."""
    multiple: int = 1
    """What the tokens of a stretch must be divisible by."""
    paths: bool = False
    """Whether the model asks which sequences pass through which tokens."""


def pack(rows: Sequence[Row], share: ContextShard, merge: bool = True) -> tuple[MicroBatch, LossTokens]:
    """One micro-batch as tensors: what the model computes, and what the loss needs of each trained token.

    Of several ranks each gets the tokens of its stretch and those trained tokens that are predicted there.
    `merge=False` computes each row by itself; loss and gradient are the same.
    """
    if not rows:
        return _empty(share)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(share.device)

    def flat(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        every = np.concatenate([values[row.places] for values, row in zip(arrays, rows, strict=True)])
        return tensor(every[mine])

    tree = _padded(build(rows, merge), share.world * share.multiple)
    first, end = _stretch(tree, share)
    edges = np.flatnonzero((first <= tree.parents) & (tree.parents < end))  # sorted by parent, so a stretch
    mine = np.isin(tree.edges, edges)
    packed = MicroBatch(
        tokens=tensor(tree.tokens[first:end]),
        positions=tensor(tree.positions[first:end]),
        runs=tuple(tree.runs),
        rows=tensor(tree.parents[edges] - first),
        labels=tensor(tree.labels[edges]),
        branches=tensor(tree.edges[mine] - (edges[0] if len(edges) else 0)),
        queries=(first, end),
        paths=_paths(tree, rows, (first, end), share.device) if share.paths else None,
        experts=None if tree.experts is None else tensor(tree.experts[first:end]),
    )
    starts = np.cumsum([0] + [int(row.segment.max()) + 1 for row in rows])
    logp = flat([row.rollout_logp for row in rows])
    weights = [np.full(len(row.tokens), row.weight, dtype=np.float32) for row in rows]
    return packed, LossTokens(
        rollout_logp=logp,
        advantage=flat([row.advantage for row in rows]),
        mask=torch.ones_like(logp),
        scale=flat(weights),
        segment=flat([row.segment + start for row, start in zip(rows, starts, strict=False)]),
    )


def predicted(rows: Sequence[Row], share: ContextShard) -> np.ndarray:
    """Which of the trained tokens of these rows this rank predicts: indices into all of them, in the rows' order."""
    tree = _padded(build(rows), share.world * share.multiple)
    first, end = _stretch(tree, share)
    parents = tree.parents[tree.edges]
    return np.flatnonzero((first <= parents) & (parents < end))


def _stretch(tree: PrefixForest, share: ContextShard) -> tuple[int, int]:
    """The tokens that this rank computes."""
    size = len(tree.tokens) // share.world
    return size * share.rank, size * (share.rank + 1)


def _paths(tree: PrefixForest, rows: Sequence[Row], stretch: tuple[int, int], device: torch.device) -> SequencePaths:
    """A token's sequences are those that end within its subtree."""
    order = np.argsort(tree.ends, kind="stable")
    lengths = np.array([run.end - run.start for run in tree.runs])
    last = np.repeat([run.last for run in tree.runs], lengths)[slice(*stretch)]
    first, end = (np.searchsorted(tree.ends[order], places) for places in (np.arange(*stretch), last))
    counts = [[rows[index].inputs for index in order], [len(rows[index].places) for index in order]]
    columns = [torch.from_numpy(column).to(device) for column in (first, end)]
    return SequencePaths(*columns, *(torch.tensor(count, dtype=torch.float64, device=device) for count in counts))


def _padded(tree: PrefixForest, multiple: int) -> PrefixForest:
    """The tree with a run of its own behind it, so that the tokens divide; nothing is asked of that run."""
    size = len(tree.tokens)
    more = -size % multiple
    if not more:
        return tree
    pad = TokenRun(size, size + more, size + more, 0)
    tokens = np.concatenate((tree.tokens, np.zeros(more, dtype=tree.tokens.dtype)))
    experts = tree.experts
    if experts is not None:
        experts = np.concatenate((experts, np.full((more, *experts.shape[1:]), PADDING, dtype=experts.dtype)))
    return replace(tree, tokens=tokens, runs=[*tree.runs, pad], experts=experts)


def _empty(share: ContextShard) -> tuple[MicroBatch, LossTokens]:
    """A micro-batch without a loss, so that every rank takes part in every collective."""
    size = share.multiple
    first, whole = size * share.rank, size * share.world
    some = torch.zeros(size, dtype=torch.long, device=share.device)
    none, nothing = some[:0], torch.zeros(0, device=share.device)
    tokens = LossTokens(rollout_logp=nothing, advantage=nothing, mask=nothing, scale=nothing, segment=none)
    paths = SequencePaths(some, some, nothing.double(), nothing.double()) if share.paths else None
    return MicroBatch(
        some, some, (TokenRun(0, whole, whole, 0),), none, none, none, (first, first + size), paths
    ), tokens
