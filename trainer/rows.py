"""One sequence to train on: what batches are made of."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Row:
    """One sequence. The arrays have one entry per token; `trained` marks the tokens that the loss is taken of."""

    tokens: np.ndarray
    trained: np.ndarray
    rollout_logp: np.ndarray
    advantage: np.ndarray
    segment: np.ndarray
    """Which of the sequence's completions sampled a token, from 0: what ratios over completions are taken over."""
    weight: float = 1.0
    """Of each of its tokens in the loss: the normalisation over the batch, relative to the mean over all tokens."""
    completions: tuple[int, ...] = ()
    """Ids of its segments' completions, where the row is recorded ones'."""

    @cached_property
    def places(self) -> np.ndarray:
        """Where the trained tokens are. The first token of all has no context to be predicted from."""
        return np.flatnonzero(self.trained)

    @property
    def inputs(self) -> int:
        """Tokens the model computes: the last trained one, and what follows it, predicts nothing."""
        return int(self.places[-1]) if len(self.places) else 0
