"""What ranks compute with an MTP head, as files; part of the job of tests/trainer/two_ranks.py."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.trainer.make import make_config, make_rows
from trainer.config import Mtp
from trainer.data.packing import plan
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import policy_loss
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy

SPLITS = {"data": "mimo", "tensor": "mimo", "experts-tensor": "qwen3_moe_head"}
"""The splits of two_ranks that are tried, with the family of the model."""
BATCHES = (make_rows(10, 1), make_rows(10, 2), make_rows(1, 3))
"""The last batch has one row, for two ranks."""


class WideMtp(Mtp, frozen=True, kw_only=True):
    LIKELIEST = 30


MTP = WideMtp(drafts=2)


def work(model: Path, out: Path, parallel: dict[str, Any], ranks: Ranks) -> None:
    """Three updates, with a checkpoint after the first; writes the models and the metrics."""
    policy = Policy(model, make_config(out, parallel={"processes": ranks.world, **parallel}, mtp=MTP), ranks)
    policy.write_hf(out / "drafting-before")
    reached = [learn(policy, 0)]
    policy.checkpoints.save(out / "drafting-checkpoint", 1)
    reached += [learn(policy, number) for number in (1, 2)]
    policy.write_hf(out / "drafting-after")
    if ranks.rank == 0:
        (out / "drafting.json").write_bytes(msgspec.json.encode(reached))


def learn(policy: Policy, number: int) -> list[float]:
    """One update on a batch."""
    rows = BATCHES[number]
    micros = plan(rows, policy.ranks.data_world, 60)[policy.ranks.data_rank]
    loss = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
    update = policy.update(micros, sum(len(row.places) for row in rows), loss, 1e-2)
    assert update.drafts is not None
    return list(update.drafts.metrics().values())
