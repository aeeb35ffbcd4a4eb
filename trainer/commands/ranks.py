"""Starting the ranks: one child, which is the only rank or torchrun with its ranks, and its end in every case.

The child dies with this process, the ranks die with torchrun; SIGINT and SIGTERM are passed on. Left out: more than one
machine (docs/cluster.md: torchrun on each, with `-m trainer.commands.worker` and the same arguments).
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from trainer.config import Parallel

GRACE_SECONDS = 10


def run_ranks(arguments: Sequence[str], parallel: Parallel) -> int:
    """Run `python -m trainer.commands.worker ARGUMENTS` on every rank and return the exit status."""
    module = (
        ["trainer.commands.worker"]
        if parallel.processes == 1
        else ["trainer.commands.torchrun", str(parallel.processes)]
    )
    command = [sys.executable, "-m", *module, *arguments]
    child = subprocess.Popen(command, env=_environment(parallel), preexec_fn=_end_too)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: _stop(child))
    status = child.wait()
    status = status if status >= 0 else 128 - status  # as a shell tells of a signal
    if status > 128:
        print(f"ended by signal {status - 128}; repeat the same command to go on", file=sys.stderr)
    return status


def _environment(parallel: Parallel) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    threads = parallel.threads or max(1, cores // parallel.processes)
    environment = {
        # Waiting threads must sleep: spinning ones made a step ten times slower beside busy neighbours.
        "OMP_WAIT_POLICY": "passive",
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
    }
    if parallel.processes == 1:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        environment |= alone
    return environment


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    timer = threading.Timer(GRACE_SECONDS, child.kill)
    timer.daemon = True
    timer.start()


def _end_too() -> None:
    die_with_parent(signal.SIGTERM)


def die_with_parent(number: int) -> None:
    """Ask the kernel for this signal when the parent dies (Linux)."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
