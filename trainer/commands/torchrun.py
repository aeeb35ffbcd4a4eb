"""torchrun for the ranks of this machine: `python -m trainer.commands.torchrun PROCESSES ARGUMENTS`, for
trainer/commands/ranks.py.

When a rank fails, torchrun ends the others; this command then ends as that rank did, with its sentence if it had one,
where torchrun's own prints a report for its developers. Left out: restarts of single ranks, more than one machine.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

SECONDS = 5
"""How long ranks may take to end after SIGTERM."""


def main(processes: int, arguments: Sequence[str]) -> int:
    """Returns the exit status: 128 more than the signal that ended a rank, else the rank's own."""
    logging.disable(logging.CRITICAL)  # of torchrun: what it says of a failure is said here
    with tempfile.TemporaryDirectory(prefix="trainer-") as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            shutdown_timeout=SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=directory),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "trainer.commands.worker", *arguments)
        except ChildFailedError as error:
            return _tell(error.failures.values())
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def _tell(failures: Iterable[ProcessFailure]) -> int:
    """Of the failed ranks: one that was killed, or else that said why, before those that lost it."""
    found = min(failures, key=lambda failure: (failure.exitcode > 0, failure.exitcode != 2))
    if found.exitcode == 2:
        print(f"error: {found.message}", file=sys.stderr)
    return found.exitcode if found.exitcode > 0 else 128 - found.exitcode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
