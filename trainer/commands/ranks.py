"""Starts the ranks: one child, which is the only rank or a torchrun with its ranks, and ends it in every case.

The child dies with this process and the ranks die with torchrun; SIGINT and SIGTERM are passed on. Not here: more than
one machine, where the user starts torchrun on each with WORKER and the same arguments (docs/cluster.md).
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from proxy.pool.processes.parent import die_with_parent
from trainer.config import Parallel

WORKER = ("-m", "trainer.commands.worker")
"""What follows `python` or `torchrun` to start a rank, before the arguments of the command line."""
GRACE_SECONDS = 10
"""How long the child may take to end after SIGTERM."""


def run_ranks(arguments: Sequence[str], parallel: Parallel) -> int:
    """Run WORKER with these arguments on every rank and return the exit status."""
    ranks = WORKER if parallel.processes == 1 else ("-m", "trainer.commands.torchrun", str(parallel.processes))
    command = [sys.executable, *ranks, *arguments]
    child = subprocess.Popen(command, env=_environment(parallel), preexec_fn=lambda: die_with_parent(signal.SIGTERM))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: _stop(child))
    status = child.wait()
    status = status if status >= 0 else 128 - status  # the shell's convention: 128 + the signal
    if status > 128:
        print(f"ended by signal {status - 128}; repeat the same command to resume", file=sys.stderr)
    return status


def _environment(parallel: Parallel) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // parallel.processes)
    environment = {
        # Waiting threads must sleep: spinning ones made a step ten times slower beside busy neighbours.
        "OMP_WAIT_POLICY": "passive",
        "PYTHONUNBUFFERED": "1",
        # Micro-batches differ in length; with fixed segments, GPU memory would be lost between their tensors.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # One queue to the GPU keeps collectives of tensor ranks beside the computing that they are meant to overlap.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        # As in SGLang's processes: NCCL cannot pass memory between GPUs of one machine where only one side has it on.
        "NCCL_CUMEM_ENABLE": "0",
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
    }
    if parallel.processes == 1:  # there is no torchrun that would set these
        places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        environment |= places
    return environment


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    timer = threading.Timer(GRACE_SECONDS, child.kill)
    timer.daemon = True
    timer.start()
