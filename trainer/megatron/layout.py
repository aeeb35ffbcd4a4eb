"""What attends to what in a micro-batch of prefix trees, as slices of contiguous queries and keys.

Pure functions of a tree's runs, which no kernel is needed for. Left out: the kernels
(trainer/megatron/attention/kernels.py).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from trainer.data.micro_batch import SequencePaths
from trainer.data.tree import TokenRun

if TYPE_CHECKING:
    from trainer.megatron.replay import RoutingReplay  # loads Megatron, which slices do not need


@dataclass(frozen=True, eq=False, slots=True)
class AttentionLayout:
    """What attends to what: the runs of the trees, and the stretch of their tokens that the queries are.

    Equal to itself alone: all layers of a pass share one, and what is made from thousands of runs is found by it.
    """

    runs: tuple[TokenRun, ...]
    queries: tuple[int, int]
    paths: SequencePaths | None = None
    """For the balance of experts, with weights as they enter the loss; absent where it has none."""
    replay: "RoutingReplay | None" = None
    """The experts to replay; absent where routers choose."""


@dataclass(frozen=True, slots=True)
class AttentionSlice:
    """Queries and keys of contiguous ranges; causal ones are square. Queries count from the first one of the layout."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


@lru_cache(maxsize=2)
def slices(layout: AttentionLayout) -> tuple[AttentionSlice, ...]:
    """Every pair of a query and its ancestor exactly once: the causal ones first, which cover every query."""
    first, end = layout.queries
    causal, full = [], []
    for run in layout.runs:
        start, stop = max(run.start, first), min(run.end, end)
        if start < stop:
            causal.append(AttentionSlice((start - first, stop - first), (start, stop), True))
            if run.start < start:  # the queries begin in the middle of the run
                full.append(AttentionSlice((start - first, stop - first), (run.start, start), False))
        start, stop = max(run.end, first), min(run.last, end)
        if start < stop:
            full.append(AttentionSlice((start - first, stop - first), (run.start, run.end), False))
    return (*causal, *full)
