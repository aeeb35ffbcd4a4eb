"""torchrun for the ranks of this machine: `python -m trainer.commands.torchrun PROCESSES ARGUMENTS`.

Started by trainer/commands/ranks.py. When a rank fails, torchrun ends the others; this command then exits as that rank
did and prints its error message, where torchrun's own command prints a report for its developers. Not here: restarts of
single ranks, more than one machine.
"""

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer.commands.ranks import WORKER

SHUTDOWN_SECONDS = 5
"""How long ranks may take to end after SIGTERM."""


def main(processes: int, arguments: Sequence[str]) -> int:
    """Run the ranks; return 128 + the signal that ended a rank, else the rank's own exit status."""
    logging.disable(logging.CRITICAL)  # torchrun's: what it logs about a failure is printed below in one sentence
    with tempfile.TemporaryDirectory(prefix="trainer-") as directory:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=str(os.getpid()),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            shutdown_timeout=SHUTDOWN_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=directory),
        )
        try:
            elastic_launch(config, sys.executable)(*WORKER, *arguments)
        except ChildFailedError as error:
            return _report(error.failures.values())
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def _report(failures: Iterable[ProcessFailure]) -> int:
    """Print why the job ended and return its exit status.

    When a rank fails, the others fail because they lost it. So a rank that was killed comes first, then one that
    exited with an error message (status 2). SIGTERM comes after these: torchrun itself ends ranks by it, for example
    rank 0 while it still closes its files after an error that all ranks have.
    """

    def order(failure: ProcessFailure) -> int:
        if failure.exitcode < 0:
            return 2 if failure.exitcode == -signal.SIGTERM else 0
        return 1 if failure.exitcode == 2 else 3

    cause = min(failures, key=order)
    if cause.exitcode == 2:
        print(f"error: {cause.message}", file=sys.stderr)
    return cause.exitcode if cause.exitcode > 0 else 128 - cause.exitcode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
