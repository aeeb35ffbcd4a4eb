"""Sequences that begin alike, merged into prefix trees, so that every shared token is computed once.

A trie over token ids is laid out in depth-first pre-order, in runs of tokens without a branch between them. A run
[start, end) whose subtree ends at `last` is all that attention needs: token i attends to token j of the run if and only
if j <= i < last. A hidden state depends on a token's ancestors alone, so logprobs equal those of each sequence by
itself (Tree Training, arXiv 2511.00413; MiniMax-M2, arXiv 2605.26494); every branch keeps its own rollout logprob,
advantage and weight, and the losses of the branches add up on the shared logprob. Where recorded experts are replayed,
they are part of the key: equal tokens that went to other experts have other hidden states.
Left out: which tokens are trained; anything that a layer would do other than token by token or by attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proxy.pool.errors import UserError
from trainer.data.row import Row


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Consecutive tokens without a branch between them."""

    start: int
    end: int
    last: int
    """One past the last token of the run's subtree."""
    depth: int
    """Position of its first token."""


@dataclass(frozen=True)
class PrefixForest:
    """A forest of rows, laid out. `edges[k]` belongs to the k-th trained token over all rows in the order given."""

    tokens: np.ndarray
    """[N] in depth-first pre-order."""
    runs: list[TokenRun]
    parents: np.ndarray
    """[edges] where the logprob of each distinct trained token is asked for."""
    labels: np.ndarray
    """[edges] those tokens."""
    edges: np.ndarray
    """[trained tokens of all rows] which edge each is."""
    ends: np.ndarray
    """[rows] where the last token of each row that is computed lies; -1 of a row without any."""
    experts: np.ndarray | None = None
    """[N, layers, experts per token] of rows that have them."""

    @property
    def positions(self) -> np.ndarray:
        """[N] the depth of each token: what RoPE turns by."""
        return np.concatenate([np.arange(run.depth, run.depth + run.end - run.start) for run in self.runs])


@dataclass(frozen=True)
class SortedRows:
    """Rows in the order of their tokens, each with the length of the beginning that it shares with the one before."""

    rows: list[Row]
    shared: list[int]

    def unique(self, start: int, end: int) -> int:
        """Distinct tokens of the rows [start, end)."""
        return sum(row.inputs for row in self.rows[start:end]) - sum(self.shared[start + 1 : end])


def order(rows: Sequence[Row]) -> SortedRows:
    """Sort rows so that each shares its longest beginning with a neighbour. Only the tokens that are inputs count."""
    keys = [_key(row) for row in rows]
    found = [rows[index] for index in sorted(range(len(rows)), key=lambda index: keys[index])]
    shared = [0] + [_common(one, other) for one, other in zip(found, found[1:], strict=False)]
    return SortedRows(found, shared[: len(found)])


def distinct(rows: Sequence[Row]) -> int:
    """Tokens that these rows are as trees."""
    return order(rows).unique(0, len(rows))


def _key(row: Row) -> bytes:
    """What rows are sorted by: their tokens, each with its experts where it has some."""
    tokens = row.tokens[: row.inputs].astype(">i4")
    if row.routes is None:
        return tokens.tobytes()
    parts = (tokens.view(np.uint8).reshape(-1, 4), row.routes[: len(tokens)].view(np.uint8).reshape(-1, 8))
    return np.concatenate(parts, axis=1).tobytes()


def _common(one: Row, other: Row) -> int:
    size = min(one.inputs, other.inputs)
    differs = one.tokens[:size] != other.tokens[:size]
    if one.routes is not None and other.routes is not None:
        differs |= one.routes[:size] != other.routes[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def cut(found: SortedRows, budget: int) -> list[SortedRows]:
    """Parts of at most `budget` distinct tokens each, that repeat as few tokens as possible.

    A part is a stretch of the sorted rows; a cut repeats the beginning that its two neighbours share, which is computed
    in both parts, with gradient, so the sum of the parts is exact. Raises UserError for a row that is over the budget.
    """
    rows, shared = found.rows, found.shared
    best: list[tuple[int, int]] = [
        (0, 0)
    ]  # tokens of the best parts of the first i rows, and where its last one starts
    for end in range(1, len(rows) + 1):
        if rows[end - 1].inputs > budget:
            raise UserError(
                f"batch.max_tokens = {budget} is below a recorded path of {rows[end - 1].inputs} tokens; raise it"
            )
        choices, size = [], 0
        for start in range(end - 1, -1, -1):
            # going back by one row: its own tokens come in, what its successor shares with it no longer counts twice
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


def build(rows: Sequence[Row], merge: bool = True) -> PrefixForest:
    """Lay rows out as one forest; at least one. `merge=False`: each row is a tree of its own."""
    found = order(rows) if merge else SortedRows(list(rows), [0] * len(rows))
    forest = _Layout()
    asked: dict[int, np.ndarray] = {}
    last: dict[int, int] = {}
    for row, shared in zip(found.rows, found.shared, strict=True):
        forest.add(row.tokens[: row.inputs], shared)
        asked[id(row)] = forest.at(row.places - 1)
        last[id(row)] = int(forest.at(np.array([row.inputs - 1]))[0]) if row.inputs else -1
    forest.close(0)
    parents = np.concatenate([asked[id(row)] for row in rows])
    labels = np.concatenate([row.tokens[row.places] for row in rows])
    # one number for a pair: a token id fits into 31 bits
    pairs, edges = np.unique((parents << 31) | labels, return_inverse=True)
    runs = sorted(forest.runs, key=lambda run: run.start)
    ends = np.array([last[id(row)] for row in rows])
    tokens = np.concatenate(forest.tokens)
    return PrefixForest(tokens, runs, pairs >> 31, pairs & ((1 << 31) - 1), edges, ends, _experts(found))


def _experts(found: SortedRows) -> np.ndarray | None:
    """Those of the tokens that are laid out, in that order: what each row adds."""
    new = [
        row.experts[shared : row.inputs]
        for row, shared in zip(found.rows, found.shared, strict=True)
        if row.experts is not None
    ]
    if len(new) not in (0, len(found.rows)):
        raise ValueError(f"{len(new)} of {len(found.rows)} rows have experts")
    return np.concatenate(new) if new else None


class _Layout:
    """The buffer so far, and the path from the root to the row that came last."""

    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.runs: list[TokenRun] = []
        self._size = 0
        self._path: list[TokenRun] = []

    def add(self, tokens: np.ndarray, shared: int) -> None:
        """Take up a row that shares its first `shared` tokens with the one before."""
        self.close(shared)
        new = tokens[shared:]
        if not len(new):
            return
        top = self._path[-1] if self._path else None
        if top is not None and top.end == self._size:  # it goes on where the row before ended: no branch
            self._path[-1] = TokenRun(top.start, top.end + len(new), 0, top.depth)
        else:
            self._path.append(TokenRun(self._size, self._size + len(new), 0, shared))
        self.tokens.append(new)
        self._size += len(new)

    def close(self, depth: int) -> None:
        """End the subtrees of what lies deeper than `depth` on the path, cutting the run that crosses it."""
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
        """Where the tokens at these depths of the last row are."""
        if not len(depths):
            return np.zeros(0, dtype=np.int64)
        firsts = np.array([run.depth for run in self._path])
        starts = np.array([run.start for run in self._path])
        on = np.searchsorted(firsts, depths, side="right") - 1
        return starts[on] + depths - firsts[on]
