"""Two processes of a training job."""

import os
import subprocess
import sys

import pytest
import torch


def run_torch(module: str, *arguments: str) -> None:
    """Run a module on two ranks of this machine, as `torchrun` does."""
    if torch.cuda.device_count() == 1:
        pytest.skip("two ranks need two GPUs, as NCCL takes one rank on each")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    subprocess.run([*torchrun, "-m", module, *arguments], check=True, env=environment, timeout=600)
