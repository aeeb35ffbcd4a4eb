"""One sequence to train on, of which batches consist."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class TrainingRow:
    """One sequence. The arrays have one entry per token."""

    tokens: np.ndarray
    """Token ids."""
    trained: np.ndarray
    """Bool: whether the token was sampled by the policy and is part of the loss. Given tokens of an answer are not."""
    rollout_logp: np.ndarray
    """Logprob, in nats, that the engine reported when it sampled the token; 0 where it is not trained."""
    advantage: np.ndarray
    """Advantage of the token's completion."""
    segment: np.ndarray
    """Index, from 0, of the completion that sampled the token, within this row: for ratios over completions."""
    weight: float = 1.0
    """Factor of each token's loss: the normalisation over the batch, relative to the mean over all tokens."""
    completions: tuple[int, ...] = ()
    """Ids of the completions, by segment. Empty for rows that were not recorded."""
    imitated: bool = False
    """Whether its tokens are imitated: their loss is -log p, and they take no part in that of the policy."""
    experts: np.ndarray | None = None
    """[tokens, layers, experts per token] of the engine (trainer/data/routed_experts.py). None: routers choose."""

    @cached_property
    def places(self) -> np.ndarray:
        """Indices of the trained tokens. Never the first token, as nothing predicts it."""
        return np.flatnonzero(self.trained)

    @cached_property
    def routes(self) -> np.ndarray | None:
        """[tokens] a 64-bit hash of each token's experts; None without experts."""
        return None if self.experts is None else _digests(self.experts)

    @property
    def inputs(self) -> int:
        """Tokens that the model computes: those before the last trained one. It and its successors predict nothing."""
        return int(self.places[-1]) if len(self.places) else 0


def _digests(experts: np.ndarray) -> np.ndarray:
    """[tokens, ...] int16 -> [tokens] uint64 hashes: the sum of each token's words times an odd number per place.

    Tokens that differ in one word always differ in the hash; others collide with a probability of about 1 / 2^64.
    """
    flat = experts.reshape(len(experts), -1)
    words = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 4))).view(np.uint64)
    odd = np.random.default_rng(0).integers(1 << 63, size=words.shape[1], dtype=np.uint64) * 2 + 1
    return words @ odd
