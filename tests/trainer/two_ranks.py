"""What two ranks compute, as files: `torchrun --nproc-per-node 2 -m tests.trainer.two_ranks DIRECTORY TENSOR`.

Makes one update of the model in DIRECTORY/model on fixed rows, checkpoints, makes another; writes the model before and
after, and the losses.
"""

import sys
from functools import partial
from pathlib import Path

import msgspec

from tests.trainer.make import make_config, make_rows
from trainer.loss import policy_loss
from trainer.megatron.parallel import Ranks, process_groups
from trainer.packing import plan
from trainer.policy import Policy
from trainer.rules import rule_of

ROWS = 10
BUDGET = 120


def work(directory: Path, out: Path, tensor: int, ranks: Ranks) -> None:
    """The same on any number of ranks."""
    parallel = {"processes": ranks.world, "tensor": tensor}
    policy = Policy(directory / "model", make_config(directory, parallel=parallel), ranks)
    policy.write_hf(out / "before")
    loss = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
    reached = []
    for seed in (1, 2):
        rows = make_rows(ROWS, seed)
        micros = plan(rows, ranks.data_world, BUDGET)[ranks.data_rank]
        update = policy.update(micros, 5 * ROWS, loss, 1e-2)
        reached.append([update.loss, update.grad_norm])
        if seed == 1:
            policy.checkpoints.save(out / "checkpoint", 1)
    policy.write_hf(out / "after")
    if ranks.rank == 0:
        (out / "reached.json").write_bytes(msgspec.json.encode(reached))


if __name__ == "__main__":
    with process_groups(int(sys.argv[3])) as ranks:
        work(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), ranks)
