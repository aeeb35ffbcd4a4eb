"""Engine against trainer: the logprobs that the engine recorded, computed again with the same weights."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.steps import latest
from proxy.pool.untrained import Untrained, to_metrics
from trainer.commands.recorded_rows import sampled_by
from trainer.config import Config
from trainer.data.packing import pack, plan
from trainer.data.row import Row
from trainer.megatron.parallel import Ranks, over_context_ranks
from trainer.policy import Policy
from trainer.preflight import demand_known_tokens


def compare_logprobs(config: Config, ranks: Ranks, run: str) -> dict[str, Any]:
    """The largest difference over the completions of `run` that the current version of `config.run` sampled.

    The training run's newest published version is the current one; `run` may be another run of the pool, say an
    evaluation after the last push.
    """
    pool = open_pool(config.pool)
    version = latest(pool, find_run(pool, config.run).id)
    if version is None:
        raise UserError(f"run {config.run!r} has published no version yet; train it first")
    excluded = Counter[Untrained]()
    rows = sampled_by(version.name, config, run, excluded)
    if not rows:
        raise UserError(f"run {run!r} holds no completion sampled by {version.name} alone; run it after the last push")
    policy = Policy(Path(version.hf_dir), config, ranks)
    demand_known_tokens(rows, policy.shape, policy.source)
    found = difference(policy, rows, config.batch.max_tokens)
    found |= {"policy_version": version.name, "excluded_tokens": to_metrics(excluded)}
    return found if policy.model.replay_counter is None else found | policy.model.replay_counter.metrics()


def difference(policy: Policy, rows: Sequence[Row], max_tokens: int) -> dict[str, Any]:
    """max |rollout logprob - recomputed logprob| over the trained tokens of these rows, and their number."""
    gaps = [torch.zeros(0, device=policy.ranks.device)]
    for micro in plan(rows, 1, max_tokens)[0]:
        packed, tokens = pack(micro, policy.share)
        gaps.append((policy.logprobs(packed) - tokens.rollout_logp).abs())
    found = over_context_ranks(torch.cat(gaps))  # its maximum is NaN where one gap is: python's max would pass over it
    largest = found.max().item() if len(found) else math.nan
    return {"max_abs_logprob_diff": largest, "logprob_tokens_compared": len(found)}
