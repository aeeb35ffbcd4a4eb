"""Simulate training runs under each schedule of trainer/config/batch.py: throughput, staleness, and what is trained.

The clock is simulated, the scheduler is the pool's own (benchmarks/schedules/simulation.py). One JSON object as the
last line, and in --out; --picture draws the curve over the window. docs/schedule.md explains the figures. Left out:
engines, sandboxes and the trainer's work, which take a fixed time each; the pushes take none.
"""

import argparse
import os
import platform
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.schedules.curve import curve
from benchmarks.schedules.figures import BLOCK, POLICIES, WORKLOADS, figures
from benchmarks.schedules.simulation import simulate


def main() -> int:
    """Simulate, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed; the figures mean little")
    parser.add_argument("--processes", type=int, default=1, help="runs that are simulated at once (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the object here")
    parser.add_argument("--picture", type=Path, help="draw the curve over the window here, as SVG")
    arguments = parser.parse_args()
    began, load = time.monotonic(), os.getloadavg()[0]
    steps, seeds = (2 * BLOCK, 1) if arguments.quick else (60, 3)
    # The quick form leaves out what only the curve needs.
    policies = ("synchronous", "strict", "windowed", "greedy") if arguments.quick else POLICIES
    cases = [(workload, policy) for workload in WORKLOADS for policy in policies]
    with get_context("spawn").Pool(arguments.processes) as workers:
        jobs = [
            (WORKLOADS[workload], POLICIES[policy], steps, seed) for workload, policy in cases for seed in range(seeds)
        ]
        traces = workers.starmap(simulate, jobs, chunksize=1)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["benchmarks/schedule.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_average": round(load, 1),
        "steps": steps,
        "seeds": seeds,
        **figures({case: traces[at * seeds : (at + 1) * seeds] for at, case in enumerate(cases)}),
        "seconds": round(time.monotonic() - began, 1),
    }
    if arguments.picture:
        arguments.picture.write_text(curve(result["cases"]))
    line = msgspec.json.encode(result)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.format(line, indent=2) + b"\n")
    print(line.decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
