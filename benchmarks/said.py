"""What every benchmark of the trainer says around its figures: when, where and how, as the last line and in a file."""

import os
import platform
import sys
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import torch


def facts(script: str) -> dict[str, Any]:
    """When, where and how a figure came about."""
    return {
        "date": date.today().isoformat(),
        "command": " ".join([f"benchmarks/{script}", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "load_average": os.getloadavg()[0],
    }


def alone() -> None:
    """Be the only process of a job."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def say(found: dict[str, Any], out: Path | None) -> None:
    """The last line, and the same in a file."""
    line = msgspec.json.encode(found)
    if out:
        out.write_bytes(msgspec.json.format(line) + b"\n")
    print(line.decode())
