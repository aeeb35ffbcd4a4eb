"""What every benchmark of the trainer reports besides its figures: when, where and how. Writes the result."""

import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import torch


def provenance(script: str) -> dict[str, Any]:
    """When, where and how a figure was measured. The load is that before the measurement."""
    return {
        "date": date.today().isoformat(),
        "command": " ".join([f"benchmarks/{script}", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "load_average": os.getloadavg()[0],
    }


def be_single_process() -> None:
    """Set torchrun's environment variables for a job of one process."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def write_result(figures: dict[str, Any], out: Path | None) -> None:
    """Print the result as the last line of output, and write it to a file if there is one."""
    line = msgspec.json.encode(figures)
    if out:
        out.write_bytes(msgspec.json.format(line) + b"\n")
    print(line.decode())
