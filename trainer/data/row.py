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
    experts: np.ndarray | None = None
    """[tokens, layers, experts per token] what the engine chose (trainer/data/routed_experts.py).
    None: the router chooses."""

    @cached_property
    def places(self) -> np.ndarray:
        """Where the trained tokens are. The first token of all has no context to be predicted from."""
        return np.flatnonzero(self.trained)

    @cached_property
    def routes(self) -> np.ndarray | None:
        """[tokens] 64 bits that name the experts of each token; None without experts."""
        return None if self.experts is None else _digests(self.experts)

    @property
    def inputs(self) -> int:
        """Tokens the model computes: the last trained one, and what follows it, predicts nothing."""
        return int(self.places[-1]) if len(self.places) else 0


def _digests(experts: np.ndarray) -> np.ndarray:
    """[tokens, ...] int16 -> [tokens] uint64: the sum of each token's words, each times an odd number of its place.

    Others that differ in one word never share it, any others with a chance of one to 2^64 or so.
    """
    flat = experts.reshape(len(experts), -1)
    words = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 4))).view(np.uint64)
    odd = np.random.default_rng(0).integers(1 << 63, size=words.shape[1], dtype=np.uint64) * 2 + 1
    return words @ odd
