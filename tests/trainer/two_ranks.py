"""What two ranks compute, as files: `torchrun --nproc-per-node 2 -m tests.trainer.two_ranks DIRECTORY OUT SPLIT`.

Makes one update of the model in DIRECTORY/model on fixed rows, checkpoints, makes two more; writes the model before and
after, and the losses.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.trainer.make import make_config, make_rows
from trainer.loss import policy_loss
from trainer.megatron.parallel import Ranks, process_groups
from trainer.packing import plan
from trainer.policy import Policy
from trainer.rows import Row
from trainer.rules import rule_of

ROWS = 10
BUDGET = 120


SPLITS: dict[str, dict[str, Any]] = {
    "one": {},
    "data": {},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True, "recompute": True},
    "context": {"context": 2},
}


def branching(seed: int) -> list[Row]:
    """Rows of two groups: members share a prompt, and some a turn."""
    rows = make_rows(ROWS, seed)
    prompts = [row.tokens[:7] for row in rows[:2]]
    return [replace(row, tokens=np.concatenate((prompts[i % 2], row.tokens[7:]))) for i, row in enumerate(rows)]


def single(seed: int) -> list[Row]:
    """One token to be predicted from one: of two ranks, one has nothing to do."""
    [row] = make_rows(1, seed)
    push = np.ones(2, dtype=np.float32)
    return [Row(row.tokens[:2], np.array([False, True]), row.rollout_logp[:2], push, row.segment[:2])]


BATCHES = (branching(1), branching(2), single(3))


def work(directory: Path, out: Path, split: str, ranks: Ranks) -> None:
    """The same on any number of ranks."""
    parallel = {"processes": ranks.world, **SPLITS[split]}
    policy = Policy(directory / "model", make_config(directory, parallel=parallel), ranks)
    policy.write_hf(out / "before")
    loss = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
    reached = []
    for number, rows in enumerate(BATCHES):
        micros = plan(rows, ranks.data_world, BUDGET)[ranks.data_rank]
        update = policy.update(micros, sum(len(row.places) for row in rows), loss, 1e-2)
        reached.append([update.loss, update.grad_norm])
        if number == 0:
            policy.checkpoints.save(out / "checkpoint", 1)
    policy.write_hf(out / "after")
    if ranks.rank == 0:
        (out / "reached.json").write_bytes(msgspec.json.encode(reached))


if __name__ == "__main__":
    chosen = SPLITS[sys.argv[3]]
    with process_groups(chosen.get("tensor", 1), chosen.get("context", 1)) as ranks:
        work(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], ranks)
