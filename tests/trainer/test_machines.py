"""A job over several machines, as docs/cluster.md starts it: torchrun on each, here as two torchruns on one machine."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.engine.process import free_port
from tests.ranks import children, gone
from tests.trainer.test_loop import finish, held_up, metrics, prepare, query, wait
from tests.trainer.test_weights import same_files
from tests.trainer.torchrun import need_gpus
from trainer.commands.ranks import WORKER

TOGETHER = ("--steps", "2", "--set", "parallel.processes=2", "--set", "parallel.tensor=2")
"""Two ranks that share one copy of the model."""


def start(directory: Path, machine: int, port: int) -> "subprocess.Popen[bytes]":
    """torchrun on one of two machines, with one rank each."""
    places = ["--nnodes=2", f"--node-rank={machine}", "--nproc-per-node=1", f"--master-port={port}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *places, "--master-addr=127.0.0.1"]
    trainer = [*WORKER, "launch", str(directory / "trainer.toml"), *TOGETHER]
    with (directory / f"machine-{machine}.log").open("ab") as log:
        return subprocess.Popen([*torchrun, *trainer], stdout=log, stderr=log)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_model_over_two_machines_of_which_one_was_lost_learns_what_one_machine_learns(tmp_path: Path) -> None:
    need_gpus(2)
    one, two = prepare(tmp_path / "one"), prepare(tmp_path / "two")
    finish(one, *TOGETHER)
    port = free_port()
    with held_up(two, 1):
        machines = [start(two, machine, port) for machine in range(2)]
        wait(lambda: query(two, "select 1 from groups where state = 'LEASED'") != [])
        [rank] = children(machines[1].pid)
        left = [rank, *children(machines[0].pid)]
        os.kill(rank, signal.SIGKILL)
        for machine in machines:
            assert machine.wait(120) != 0
        wait(lambda: gone(left))
    port = free_port()
    for machine in [start(two, machine, port) for machine in range(2)]:
        assert machine.wait(240) == 0, (two / "machine-0.log").read_text()[-3000:]
    assert [row["loss"] for row in metrics(two)[1:]] == [row["loss"] for row in metrics(one)[1:]]
    assert same_files(one / "out/models/step-000002", two / "out/models/step-000002")
