"""Logprobs of recorded rows, computed again by the trainer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.pool.records import Completion
from tests.trainer.make import make_config
from trainer.batch import merge, why_not_trainable
from trainer.check import difference
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy

MAX_TOKENS = 40_960


@dataclass(frozen=True)
class Recomputed:
    """How far off the recorded logprobs are at most, over how many tokens in how many sequences."""

    gap: float
    tokens: int
    sequences: int
    excluded: Counter[str]
    """Sampled tokens that are not trained, by reason."""


class Recompute:
    """Computes with the weights of a model directory; each is loaded once."""

    def __init__(self, ranks: Ranks, directory: Path):
        self._ranks = ranks
        self._config = make_config(directory)
        self._policies: dict[Path, Policy] = {}

    def __call__(self, model: Path, chain: Sequence[Completion]) -> Recomputed:
        """For the completions of one attempt in commit order."""
        if model not in self._policies:
            self._policies[model] = Policy(model, self._config, self._ranks)
        excluded = Counter[str]()
        rows = merge(chain, 0.0, excluded, why_not_trainable)
        found = difference(self._policies[model], rows, MAX_TOKENS)
        return Recomputed(
            gap=found["max_abs_logprob_diff"],
            tokens=found["logprob_tokens_compared"],
            sequences=len(rows),
            excluded=excluded,
        )
