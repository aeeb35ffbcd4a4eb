"""Pack rows into micro-batches: which rows go to which rank, and the tensors that the model and the loss get of them.

Rows that begin alike stay together as trees, as far as the token budget allows. Each tree goes to the rank with the
least work so far, by the cost of its linear layers and its attention. Left out: the trees themselves
(trainer/data/tree.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from trainer.config.model_shape import ModelShape
from trainer.data.micro_batch import MicroBatch, SequencePaths
from trainer.data.routed_experts import PADDING
from trainer.data.row import TrainingRow
from trainer.data.to_device import to_device
from trainer.data.tree import PrefixForest, SortedRows, TokenRun, build, cut, order
from trainer.loss.policy_loss import LossTokens

KEY_COST = 1e-4
"""Cost of one attended key, relative to that of one token's linear layers, where the model is not known."""


@dataclass(frozen=True)
class TreePart:
    """Rows that are computed together: a tree, or a part of one that is over the budget."""

    rows: list[TrainingRow]
    tokens: int
    """Distinct tokens."""
    cost: float
    """Cost in units of one token's linear layers."""


def key_cost(shape: ModelShape) -> float:
    """FLOPs of one query-key pair in attention, over those of one token in the linear layers of the same layer."""
    width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linear = 2 * shape.hidden * (2 * width + 2 * keys + 3 * shape.token_ffn())
    return 4 * width / linear


def plan(
    rows: Sequence[TrainingRow], ranks: int, max_tokens: int, per_key: float = KEY_COST
) -> list[list[list[TrainingRow]]]:
    """[rank][micro-batch] -> rows. Deterministic. Every rank gets the same number of micro-batches; some may be empty.

    Costliest trees first, each to the rank with the least work, there into the first micro-batch with room (at most
    `max_tokens` distinct tokens). `per_key`: cost of an attended key (`key_cost`). UserError for a row that is longer
    than `max_tokens`.
    """
    parts = sorted(divide([row for row in rows if row.inputs], max_tokens, per_key), key=lambda part: -part.cost)
    loads = [0.0] * ranks
    bins: list[list[list[TreePart]]] = [[] for _ in range(ranks)]
    for part in parts:
        rank = loads.index(min(loads))
        loads[rank] += part.cost
        for micro in bins[rank]:
            if sum(other.tokens for other in micro) + part.tokens <= max_tokens:
                micro.append(part)
                break
        else:
            bins[rank].append([part])
    count = max(1, *(len(mine) for mine in bins))
    return [
        [[row for part in micro for row in part.rows] for micro in mine] + [[] for _ in range(count - len(mine))]
        for mine in bins
    ]


def group_cost(rows: Sequence[TrainingRow], per_key: float = KEY_COST) -> float:
    """The cost of a group's rows in whole trees, in tokens' linear layers."""
    everything = [row for row in rows if row.inputs]
    return sum(part.cost for part in divide(everything, sum(row.inputs for row in everything), per_key))


def divide(rows: Sequence[TrainingRow], max_tokens: int, per_key: float = KEY_COST) -> list[TreePart]:
    """The trees of these rows; those over the budget are cut into parts."""
    ordered = order(rows)
    ends = [index for index, shared in enumerate(ordered.shared) if not shared] + [len(ordered.rows)]
    parts = []
    for start, end in pairwise(ends):
        tree = SortedRows(ordered.rows[start:end], ordered.shared[start:end])
        parts += [_tree_part(part, per_key) for part in cut(tree, max_tokens)]
    return parts


def _tree_part(ordered: SortedRows, per_key: float) -> TreePart:
    """These rows with their cost: one per distinct token, and `per_key` for each key that a token attends to."""
    spans = [(row.inputs, shared) for row, shared in zip(ordered.rows, ordered.shared, strict=True)]
    keys = sum(length * (length + 1) - shared * (shared + 1) for length, shared in spans) / 2
    tokens = sum(length - shared for length, shared in spans)
    return TreePart(ordered.rows, tokens, tokens + per_key * keys)


@dataclass(frozen=True)
class ContextShard:
    """The part of a micro-batch that a rank computes."""

    device: torch.device
    rank: int = 0
    world: int = 1
    """Ranks that divide the micro-batch's tokens among them, in equal stretches."""
    multiple: int = 1
    """The number of tokens in a stretch is padded to a multiple of this."""
    paths: bool = False
    """Whether the model needs `MicroBatch.paths`."""


def pack(rows: Sequence[TrainingRow], shard: ContextShard, merge: bool = True) -> tuple[MicroBatch, LossTokens]:
    """Make tensors of one micro-batch: the model's input, and what the loss needs to know of each trained token.

    Where several ranks share it, each gets the tokens of its stretch, and the trained tokens that are predicted there.
    `merge=False` computes each row by itself; loss and gradient are the same.
    """
    if not rows:
        return _empty(shard)

    def tensor(values: np.ndarray) -> torch.Tensor:
        return to_device(values, shard.device)

    def flat(arrays: Sequence[np.ndarray]) -> torch.Tensor:
        every = np.concatenate([values[row.places] for values, row in zip(arrays, rows, strict=True)])
        return tensor(every[mine])

    tree = _padded(build(rows, merge), shard.world * shard.multiple)
    first, end = _stretch(tree, shard)
    edges = np.flatnonzero((first <= tree.parents) & (tree.parents < end))  # sorted by parent, so a stretch
    mine = np.isin(tree.edges, edges)
    branches = tree.edges[mine] - (edges[0] if len(edges) else 0)
    packed = MicroBatch(
        tokens=tensor(tree.tokens[first:end]),
        positions=tensor(tree.positions[first:end]),
        runs=tuple(tree.runs),
        rows=tensor(tree.parents[edges] - first),
        labels=tensor(tree.labels[edges]),
        branches=tensor(branches),
        nodes=(tree.parents[edges] - first)[branches],
        queries=(first, end),
        paths=_paths(tree, rows, (first, end), shard.device) if shard.paths else None,
        experts=None if tree.experts is None else tensor(tree.experts[first:end]),
    )
    starts = np.cumsum([0] + [int(row.segment.max()) + 1 for row in rows])
    segments = np.concatenate([row.segment[row.places] + start for row, start in zip(rows, starts, strict=False)])
    logp = flat([row.rollout_logp for row in rows])
    weights = [np.full(len(row.tokens), row.weight, dtype=np.float32) for row in rows]
    marks = [np.full(len(row.tokens), row.imitated, dtype=np.float32) for row in rows]
    imitated = flat(marks) if any(row.imitated for row in rows) else None
    return packed, LossTokens(
        rollout_logp=logp,
        advantage=flat([row.advantage for row in rows]),
        mask=torch.ones_like(logp) if imitated is None else 1 - imitated,
        scale=flat(weights),
        imitated=imitated,
        segment=tensor(np.unique(segments[mine], return_inverse=True)[1]),
    )


def predicted(rows: Sequence[TrainingRow], shard: ContextShard) -> np.ndarray:
    """Indices of the trained tokens, over the rows' trained tokens concatenated, that this rank predicts."""
    tree = _padded(build(rows), shard.world * shard.multiple)
    first, end = _stretch(tree, shard)
    parents = tree.parents[tree.edges]
    return np.flatnonzero((first <= parents) & (parents < end))


def _stretch(tree: PrefixForest, shard: ContextShard) -> tuple[int, int]:
    """[first, end) of the tokens that this rank computes."""
    size = len(tree.tokens) // shard.world
    return size * shard.rank, size * (shard.rank + 1)


def _paths(
    tree: PrefixForest, rows: Sequence[TrainingRow], stretch: tuple[int, int], device: torch.device
) -> SequencePaths:
    """The sequences through each token of the stretch: those that end within the token's subtree."""
    order = np.argsort(tree.ends, kind="stable")
    lengths = np.array([run.end - run.start for run in tree.runs])
    last = np.repeat([run.last for run in tree.runs], lengths)[slice(*stretch)]
    first, end = (np.searchsorted(tree.ends[order], places) for places in (np.arange(*stretch), last))
    ended = [rows[index] for index in order]
    counts = [[row.inputs for row in ended], [len(row.places) if row.weight else 0 for row in ended]]
    columns = [first, end, *(np.array(count, dtype=np.float64) for count in counts)]
    return SequencePaths(*(to_device(column, device) for column in columns))


def _padded(tree: PrefixForest, multiple: int) -> PrefixForest:
    """Append a run of padding, so that the tokens divide by `multiple`. No logprob is needed there."""
    size = len(tree.tokens)
    missing = -size % multiple
    if not missing:
        return tree
    pad = TokenRun(size, size + missing, size + missing, 0)
    tokens = np.concatenate((tree.tokens, np.zeros(missing, dtype=tree.tokens.dtype)))
    experts = tree.experts
    if experts is not None:
        experts = np.concatenate((experts, np.full((missing, *experts.shape[1:]), PADDING, dtype=experts.dtype)))
    return replace(tree, tokens=tokens, runs=[*tree.runs, pad], experts=experts)


def _empty(shard: ContextShard) -> tuple[MicroBatch, LossTokens]:
    """A micro-batch without a loss, with which a rank without rows takes part in the collectives."""
    size = shard.multiple
    first, whole = size * shard.rank, size * shard.world
    some = torch.zeros(size, dtype=torch.long, device=shard.device)
    none, nothing = some[:0], torch.zeros(0, device=shard.device)
    tokens = LossTokens(rollout_logp=nothing, advantage=nothing, mask=nothing, scale=nothing, segment=none)
    paths = SequencePaths(some, some, nothing.double(), nothing.double()) if shard.paths else None
    runs, places = (TokenRun(0, whole, whole, 0),), np.zeros(0, dtype=np.int64)
    return MicroBatch(some, some, runs, none, none, none, places, (first, first + size), paths), tokens
