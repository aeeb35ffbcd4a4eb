"""Merge sequences that begin alike into prefix trees, so that every shared token is computed once.

A trie over token ids is laid out in depth-first pre-order, as runs of tokens without a branch between them. A run
[start, end) and the end `last` of its subtree are all that attention needs: token i attends to token j of the run if
and only if j <= i < last. A hidden state depends only on a token and its ancestors, so logprobs equal those of each
sequence alone (Tree Training, arXiv 2511.00413; MiniMax-M2, arXiv 2605.26494). Every branch keeps its own rollout
logprob, advantage and weight; the losses of the branches add up on the shared logprob. Where recorded experts are
replayed, they are part of the key: equal tokens with other experts have other hidden states.
Left out: which tokens are trained; layers that mix tokens in any way but attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proxy.pool.errors import UserError
from trainer.data.row import TrainingRow


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens without a branch between them, [start, end)."""

    start: int
    end: int
    last: int
    """One past the last token of the run's subtree."""
    depth: int
    """Position of its first token in its sequence."""


@dataclass(frozen=True)
class PrefixForest:
    """Rows laid out as prefix trees. An edge is a trained token as the child of the token before it."""

    tokens: np.ndarray
    """[N] token ids in depth-first pre-order."""
    runs: list[TokenRun]
    parents: np.ndarray
    """[edges] index of the token before each distinct trained token: its logprob is computed there."""
    labels: np.ndarray
    """[edges] the trained tokens."""
    edges: np.ndarray
    """[trained tokens of all rows, in the order in which rows were given] the edge of each."""
    ends: np.ndarray
    """[rows] index of the last computed token of each row; -1 for a row without any."""
    experts: np.ndarray | None = None
    """[N, layers, experts per token]. None where rows have none."""

    @property
    def positions(self) -> np.ndarray:
        """[N] the depth of each token in its tree: its position for RoPE."""
        return np.concatenate([np.arange(run.depth, run.depth + run.end - run.start) for run in self.runs])


@dataclass(frozen=True)
class SortedRows:
    """Rows sorted by their tokens; `shared[i]` tokens at the beginning of row i are also those of row i - 1."""

    rows: list[TrainingRow]
    shared: list[int]

    def unique(self, start: int, end: int) -> int:
        """Distinct tokens of rows start to end - 1."""
        return sum(row.inputs for row in self.rows[start:end]) - sum(self.shared[start + 1 : end])


def order(rows: Sequence[TrainingRow]) -> SortedRows:
    """Sort rows so that each shares its longest beginning with a neighbour. Only tokens that are computed count."""
    keys = [_key(row) for row in rows]
    ordered = [rows[index] for index in sorted(range(len(rows)), key=lambda index: keys[index])]
    shared = [0] + [_common(one, other) for one, other in zip(ordered, ordered[1:], strict=False)]
    return SortedRows(ordered, shared[: len(ordered)])


def distinct(rows: Sequence[TrainingRow]) -> int:
    """The number of distinct tokens of these rows, merged into trees."""
    return order(rows).unique(0, len(rows))


def _key(row: TrainingRow) -> bytes:
    """What rows are sorted by: tokens, each with its experts if it has some. Big-endian, so bytes sort as numbers."""
    tokens = row.tokens[: row.inputs].astype(">i4")
    if row.routes is None:
        return tokens.tobytes()
    parts = (tokens.view(np.uint8).reshape(-1, 4), row.routes[: len(tokens)].view(np.uint8).reshape(-1, 8))
    return np.concatenate(parts, axis=1).tobytes()


def _common(one: TrainingRow, other: TrainingRow) -> int:
    """Tokens that two rows share at their beginning."""
    size = min(one.inputs, other.inputs)
    differs = one.tokens[:size] != other.tokens[:size]
    if one.routes is not None and other.routes is not None:
        differs |= one.routes[:size] != other.routes[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def cut(ordered: SortedRows, budget: int) -> list[SortedRows]:
    """Cut sorted rows into parts of at most `budget` distinct tokens each, which repeat as few tokens as possible.

    A part is a range of the rows. A cut repeats the beginning that its two neighbours share: it is computed in both
    parts, with gradient, so the sum over the parts is exact. Dynamic programming over the last row of a part. UserError
    for a row over the budget.
    """
    rows, shared = ordered.rows, ordered.shared
    # best[i]: computed tokens of the best parts of the first i rows, and the row at which the last part starts
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(rows) + 1):
        if rows[end - 1].inputs > budget:
            raise UserError(
                f"batch.max_tokens = {budget} is below a recorded path of {rows[end - 1].inputs} tokens; raise it"
            )
        choices, size = [], 0
        for start in range(end - 1, -1, -1):
            # a row more: add its tokens, and subtract what its successor shares with it
            size += rows[start].inputs - (shared[start + 1] if start + 1 < end else 0)
            if size > budget:
                break
            choices.append((best[start][0] + size, start))
        best.append(min(choices))
    parts, end = [], len(rows)
    while end:
        start = best[end][1]
        parts.append(SortedRows(rows[start:end], [0, *shared[start + 1 : end]]))
        end = start
    return parts[::-1]


def build(rows: Sequence[TrainingRow], merge: bool = True) -> PrefixForest:
    """Lay rows out as prefix trees. At least one row. `merge=False`: each row is a tree of its own.

    ValueError when only some of the rows have experts.
    """
    ordered = order(rows) if merge else SortedRows(list(rows), [0] * len(rows))
    layout = _Layout()
    parents_of: dict[int, np.ndarray] = {}
    end_of: dict[int, int] = {}
    for row, shared in zip(ordered.rows, ordered.shared, strict=True):
        layout.add(row.tokens[: row.inputs], shared)
        parents_of[id(row)] = layout.at(row.places - 1)
        end_of[id(row)] = int(layout.at(np.array([row.inputs - 1]))[0]) if row.inputs else -1
    layout.close(0)
    parents = np.concatenate([parents_of[id(row)] for row in rows])
    labels = np.concatenate([row.tokens[row.places] for row in rows])
    # a pair (parent, label) as one number, as a token id fits into 31 bits
    pairs, edges = np.unique((parents << 31) | labels, return_inverse=True)
    runs = sorted(layout.runs, key=lambda run: run.start)
    ends = np.array([end_of[id(row)] for row in rows])
    tokens = np.concatenate(layout.tokens)
    return PrefixForest(tokens, runs, pairs >> 31, pairs & ((1 << 31) - 1), edges, ends, _experts(ordered))


def _experts(ordered: SortedRows) -> np.ndarray | None:
    """The experts of the tokens in the order of the layout: what each row adds."""
    added = [
        row.experts[shared : row.inputs]
        for row, shared in zip(ordered.rows, ordered.shared, strict=True)
        if row.experts is not None
    ]
    if len(added) not in (0, len(ordered.rows)):
        raise ValueError(f"{len(added)} of {len(ordered.rows)} rows have experts")
    return np.concatenate(added) if added else None


class _Layout:
    """The tokens laid out so far, and the path of runs from the root to the end of the last row."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.runs: list[TokenRun] = []
        self._size = 0
        self._path: list[TokenRun] = []

    def add(self, tokens: np.ndarray, shared: int) -> None:
        """Append a row that shares its first `shared` tokens with the row before."""
        self.close(shared)
        new = tokens[shared:]
        if not len(new):
            return
        top = self._path[-1] if self._path else None
        if top is not None and top.end == self._size:  # it continues where the row before ended, so there is no branch
            self._path[-1] = TokenRun(top.start, top.end + len(new), 0, top.depth)
        else:
            self._path.append(TokenRun(self._size, self._size + len(new), 0, shared))
        self.tokens.append(new)
        self._size += len(new)

    def close(self, depth: int) -> None:
        """End the subtrees below `depth` on the path. Cuts the run that crosses it in two."""
        while self._path and self._path[-1].depth >= depth:
            run = self._path.pop()
            self.runs.append(TokenRun(run.start, run.end, self._size, run.depth))
        if self._path:
            run = self._path[-1]
            middle = run.start + depth - run.depth
            if middle < run.end:
                self.runs.append(TokenRun(middle, run.end, self._size, depth))
                self._path[-1] = TokenRun(run.start, middle, 0, run.depth)

    def at(self, depths: np.ndarray) -> np.ndarray:
        """[depths] the indices of the last row's tokens at these depths."""
        if not len(depths):
            return np.zeros(0, dtype=np.int64)
        firsts = np.array([run.depth for run in self._path])
        starts = np.array([run.start for run in self._path])
        number = np.searchsorted(firsts, depths, side="right") - 1
        return starts[number] + depths - firsts[number]
