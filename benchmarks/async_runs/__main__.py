"""Train the demo's tasks twice, with commands that take long: synchronously, and with the default schedule.

Everything is real: SGLang on this machine's CPU, `trainer launch`, `harness run`, the recorded warm start of
benchmarks/demo_rollouts. Both runs have the same seed, tasks and sleeps, and differ in batch.schedule alone. Prints one
JSON object as the last line; docs/schedule.md explains it. Left out: tasks whose tools compute, so that the cores and
not the slowest attempt would be what a step waits for.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from settings import RUN

from benchmarks.async_runs.figures import compared, run_figures
from benchmarks.async_runs.timed_run import QUICK, Sizes, TimedRun
from benchmarks.result import provenance, write_result
from trainer.config.batch import BatchConfig, Schedule

SCHEDULES: tuple[Schedule, Schedule] = ("synchronous", "windowed")


def timed(directory: Path, schedule: Schedule, sizes: Sizes, seed: int) -> dict[str, Any]:
    """Run one schedule and return its figures, with the machine's load over its last 15 minutes."""
    batch = BatchConfig(groups=sizes.groups, schedule=schedule)
    run = TimedRun(directory, batch, sizes, seed, Console())
    run.say(batch.text())
    try:
        run.go()
    finally:
        run.close()
    try:
        return run_figures(run.pool, RUN, batch) | {"load_average": os.getloadavg()}
    finally:
        run.pool.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small steps each; the figures mean little")
    parser.add_argument("--seed", type=int, default=0, help="of tasks, sleeps and their order (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep pools and logs in this new directory")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs `finally` blocks, which end the services
    sizes = QUICK if arguments.quick else Sizes()
    figures = provenance("async_run.py") | {"seed": arguments.seed, "sizes": sizes}
    with tempfile.TemporaryDirectory(prefix="blackforge-async-run-") as temporary:
        directory = (arguments.keep or Path(temporary)).absolute()
        runs = {schedule: timed(directory / schedule, schedule, sizes, arguments.seed) for schedule in SCHEDULES}
    write_result(figures | compared(*runs.values()) | {"runs": runs}, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
