"""Several processes of a training job, where the machine can have them."""

import os
import subprocess
import sys

import pytest
import torch


def need_gpus(ranks: int) -> None:
    """Skip the test on a machine with GPUs but fewer than that. One without any runs all ranks on its CPU."""
    if 0 < torch.cuda.device_count() < ranks:
        pytest.skip(f"{ranks} ranks need {ranks} GPUs, as NCCL takes one rank on each")


def run_torch(module: str, *arguments: str) -> None:
    """Run a module on two ranks of this machine, as `torchrun` does."""
    need_gpus(2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    subprocess.run([*torchrun, "-m", module, *arguments], check=True, env=environment, timeout=600)
