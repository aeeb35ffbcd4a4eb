"""`trainer logprobs`: recompute the logprobs that the engine recorded, with the same weights, and compare."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.steps import Version, latest
from proxy.pool.untrained import Untrained, to_metrics
from trainer.commands.recorded_rows import sampled_by
from trainer.config import Config
from trainer.data.packing import pack, plan
from trainer.data.row import TrainingRow
from trainer.megatron.parallel import Ranks, over_context_ranks
from trainer.policy import Policy
from trainer.preflight import demand_known_tokens


def compare_logprobs(config: Config, ranks: Ranks, run: str) -> dict[str, Any]:
    """Compare engine and trainer on the completions of `run` that the newest version of `config.run` sampled.

    `run` may be another run of the pool, for example an evaluation after the last push. Raises UserError when nothing
    can be compared.
    """
    version, rows, excluded = ranks.share(lambda: newest_sampled(config, ranks, run))
    policy = Policy(Path(version.hf_dir), config, ranks)
    demand_known_tokens(rows, policy.shape, policy.source)
    result = difference(policy, rows, config.batch.max_tokens)
    result |= {"policy_version": version.name, "excluded_tokens": to_metrics(excluded)}
    return result if policy.model.replay_counter is None else result | policy.model.replay_counter.metrics()


def newest_sampled(config: Config, ranks: Ranks, run: str) -> tuple[Version, list[TrainingRow], Counter[Untrained]]:
    """Return the newest version of `config.run`, rows of what it sampled in `run`, and which tokens are left out.

    Rank 0 alone calls this, as the others need not reach the pool. Raises UserError when there is no such row.
    """
    pool = open_pool(config.pool)
    version = latest(pool, find_run(pool, config.run).id)
    if version is None:
        raise UserError(f"run {config.run!r} has published no version yet; train it first")
    excluded = Counter[Untrained]()
    with ranks.shown(f"reading what {version.name} sampled"):
        rows = sampled_by(version.name, config, run, excluded)
    if not rows:
        raise UserError(
            f"run {run!r} holds no completion to compare, which {version.name} alone sampled from the model's own "
            f"distribution (excluded tokens: {to_metrics(excluded) or 'none'}); run it after the last push, without a "
            "grammar or sampling parameters"
        )
    return version, rows, excluded


def difference(policy: Policy, rows: Sequence[TrainingRow], max_tokens: int) -> dict[str, Any]:
    """Return max |rollout logprob - recomputed logprob| over the trained tokens of these rows, and their number."""
    gaps = [torch.zeros(0, device=policy.ranks.device)]
    micros = plan(rows, 1, max_tokens)[0]
    with policy.ranks.shown("computing logprobs", len(micros), "micro-batches") as advance:
        for micro in micros:
            packed, tokens = pack(micro, policy.shard)
            gaps.append((policy.logprobs(packed) - tokens.rollout_logp).abs())
            advance(1)
    every = over_context_ranks(torch.cat(gaps))
    # torch's maximum is NaN where one gap is NaN; Python's max would hide it.
    largest = every.max().item() if len(every) else math.nan
    return {"max_abs_logprob_diff": largest, "logprob_tokens_compared": len(every)}
