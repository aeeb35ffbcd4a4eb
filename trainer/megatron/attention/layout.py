"""Which tokens of a micro-batch attend to which, as slices of contiguous queries and keys.

Pure functions of the runs of prefix trees (trainer/data/tree.py); no kernel is needed for them. Left out: the kernels
(trainer/megatron/attention/kernels.py).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from trainer.data.micro_batch import SequencePaths
from trainer.data.tree import TokenRun

if TYPE_CHECKING:
    from trainer.megatron.replay import RoutingReplay  # imports Megatron, which slices do not need


@dataclass(frozen=True, eq=False, slots=True)
class AttentionLayout:
    """What one micro-batch's layers need to know of its prefix trees.

    Compares by identity (`eq=False`): all layers of a pass share one object, and caches find slices, masks and ranges
    by it without hashing thousands of runs.
    """

    runs: tuple[TokenRun, ...]
    queries: tuple[int, int]
    """[first, end) of the tokens that are queries on this rank; keys are all tokens of the runs."""
    paths: SequencePaths | None = None
    """What the load-balancing loss is made of, with weights as they enter the loss. None: there is no such loss."""
    replay: "RoutingReplay | None" = None
    """The recorded experts to use. None: the routers choose."""


@dataclass(frozen=True, slots=True)
class AttentionSlice:
    """A range of queries that attends to a range of keys, both half-open.

    A causal slice is square and masked above its diagonal; in any other, every query attends to every key. Queries
    count from the first one of the layout, keys from the first token of the micro-batch.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


@lru_cache(maxsize=2)
def slices(layout: AttentionLayout) -> tuple[AttentionSlice, ...]:
    """Cover every pair of a query and its ancestor exactly once. Causal slices come first, and cover every query.

    The cache holds the layouts of the current micro-batch (the policy's, and the MTP head's): all layers share the
    result.
    """
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
