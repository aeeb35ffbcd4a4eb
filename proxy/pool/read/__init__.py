"""Recorded rollouts as data: Python objects, Arrow record batches, Hugging Face datasets (docs/pool.md). Writes no row.

from proxy.pool.read import RolloutFilter, rollouts
for rollout in rollouts("runs/pool.db", RolloutFilter(run="train")):
    print(rollout.task, rollout.reward, [len(item.tokens) for item in rollout.completions])
"""

from proxy.pool.read.arrow import record_batches
from proxy.pool.read.hugging_face import dataset
from proxy.pool.read.pages import RolloutFilter, rollouts
from proxy.pool.read.records import CompletionRecord, RolloutRecord

__all__ = ["CompletionRecord", "RolloutFilter", "RolloutRecord", "dataset", "record_batches", "rollouts"]
