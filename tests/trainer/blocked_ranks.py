"""Two ranks that never get out of their group, of which the second one has an error of its own:
`python -m tests.trainer.blocked_ranks CONFIG DIRECTORY`.

So it is with NCCL, whose groups are left together, and for which a machine without two GPUs has no other stand-in.
Each rank leaves its errors in DIRECTORY, as under torchrun. Prints the exit statuses as JSON.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from proxy.engine.process import free_port
from proxy.pool.errors import UserError
from trainer.commands import worker
from trainer.config import Config
from trainer.megatron.parallel import Ranks

leave = dist.destroy_process_group


def train(_config: Config, ranks: Ranks) -> None:
    """Fail on rank 1, for which rank 0 waits until the connection breaks."""
    if ranks.rank == 1:
        raise UserError("the disk of rank 1 is full")
    ranks.wait()


def wait_for_ever(group: Any = None) -> None:
    """Leave any other group than that of all ranks."""
    if group is None:
        time.sleep(3600)
    leave(group)


def main(config: str, directory: Path) -> None:
    vars(dist)["destroy_process_group"] = wait_for_ever
    vars(worker)["train"] = train
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    pids = []
    for rank in ("0", "1"):
        pid = os.fork()
        if pid == 0:
            error = str(directory / f"error-{rank}.json")
            os.environ.update(RANK=rank, LOCAL_RANK=rank, TORCHELASTIC_ERROR_FILE=error)
            sys.exit(worker.main(["launch", config, "--nproc", "2"]))
        pids.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(msgspec.json.encode(statuses).decode())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
