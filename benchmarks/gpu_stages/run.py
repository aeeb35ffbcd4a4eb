"""Ask a GPU what nobody could ask without one, in stages: the last line of output is one JSON object with all figures.

Each stage is a process of its own with a time limit, and prints a JSON line when it ends; together they take at most
nine minutes. A stage that lacks a part of the machine says so, one that fails or takes too long keeps the figures that
it had, and the next one runs. Without a GPU the same stages run with small sizes, which checks them and measures
nothing. `--carry DIR` fetches the wheels that a machine without a network needs. docs/cluster.md explains the figures.
Left out: engines, several GPUs.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.carry import carry

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Stage:
    """A stage and the seconds that it may take, of nine minutes for all."""

    name: str
    limit: int


STAGES = (
    Stage("attention", 95),
    Stage("stack", 66),
    Stage("long_paths", 60),
    Stage("step", 115),
    Stage("demo_replay", 46),
    Stage("mixture", 58),
    Stage("gradients", 60),
    Stage("compiled", 40),
)
"""The most telling first. The module of each has its name."""
QUICK_LIMIT = 240
"""Seconds of any stage with --quick, which is for machines that do other work as well."""


def run_stage(stage: Stage, small: bool, directory: Path) -> dict[str, Any]:
    """Run a stage in a process of its own, and return its figures and how it ended."""
    file = directory / f"{stage.name}.json"
    command = [sys.executable, "-m", "benchmarks.gpu_stages.worker", stage.name, str(file), *["--small"] * small]
    # One cache of compiled kernels for all stages, and none of earlier runs: compile times are figures too.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor"), "TRITON_CACHE_DIR": str(directory / "triton")}
    began, limit = time.monotonic(), QUICK_LIMIT if small else stage.limit
    # What the trainer prints goes beside the lines of JSON.
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **cache}, stdout=sys.stderr, start_new_session=True
    )
    try:
        code: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process)  # also what it has left behind: torch compiles in processes of its own
        shutil.rmtree(file.with_suffix(""), ignore_errors=True)  # a checkpoint fills the disk for the next stage
    line: dict[str, Any] = {"stage": stage.name, "seconds": round(time.monotonic() - began, 2), "limit": limit}
    figures: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if code is None:
        figures["ended"] = "timed out"
    elif code:
        figures["ended"] = "failed"
    return line | figures


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run(names: Sequence[str], small: bool) -> Iterator[dict[str, Any]]:
    """Run these stages one after the other, and give each one's line when it has ended."""
    with tempfile.TemporaryDirectory() as directory:
        for stage in STAGES:
            if stage.name in names:
                yield run_stage(stage, small, Path(directory))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 when a stage failed or took too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", action="append", choices=names, help="run only this stage; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes, as on a machine without a GPU")
    parser.add_argument(
        "--carry", type=Path, metavar="DIR", help="only fetch the wheels for a machine without a network"
    )
    parser.add_argument("--out", type=Path, help="also write the object to this file, anew after each stage")
    options = parser.parse_args(arguments)
    if options.carry:
        return carry(options.carry)
    command = " ".join(["benchmarks/gpu.py", *(sys.argv[1:] if arguments is None else arguments)])
    result: dict[str, Any] = {"date": date.today().isoformat(), "command": command, "machine": "", "stages": {}}
    for line in run(options.stage or names, options.quick):
        result["stages"][line["stage"]] = line
        result["machine"] = result["machine"] or line.get("machine", "")
        print(json.dumps(line), flush=True)
        if options.out:  # after each stage, so that a run that is ended from outside leaves what it had
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(any(line["ended"] not in ("whole", "lacks a part") for line in result["stages"].values()))
