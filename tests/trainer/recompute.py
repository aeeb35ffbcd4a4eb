"""Logprobs of recorded rows, computed again by the trainer."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.pool.completions.records import Completion
from proxy.pool.untrained import Untrained
from tests.trainer.make import make_config
from trainer.commands.logprobs import difference
from trainer.data.assemble import merge, why_not_trainable
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy

MAX_TOKENS = 40_960


@dataclass(frozen=True)
class Recomputed:
    """The largest error of recorded logprobs, and over how many tokens in how many sequences."""

    gap: float
    tokens: int
    sequences: int
    excluded: Counter[Untrained]
    """Sampled tokens that are not trained, by reason."""
    routing: dict[str, float]
    """Metrics of the replay of recorded experts."""


class Recompute:
    """Computes with the weights of model directories; each directory is loaded once."""

    def __init__(self, ranks: Ranks, directory: Path):
        self._ranks, self._directory = ranks, directory
        self._policies: dict[tuple[Path, str], Policy] = {}

    def __call__(self, model: Path, chain: Sequence[Completion], routing: str = "own") -> Recomputed:
        """Recompute the completions of one attempt, in commit order."""
        if (model, routing) not in self._policies:
            config = make_config(self._directory, loss={"routing": routing})
            self._policies[model, routing] = Policy(model, config, self._ranks)
        policy, excluded = self._policies[model, routing], Counter[Untrained]()
        rows = merge(chain, 0.0, excluded, why_not_trainable, mixture=policy.mixture)
        result = difference(policy, rows, MAX_TOKENS)
        return Recomputed(
            gap=result["max_abs_logprob_diff"],
            tokens=result["logprob_tokens_compared"],
            sequences=len(rows),
            excluded=excluded,
            routing={} if policy.model.replay_counter is None else policy.model.replay_counter.metrics(),
        )
