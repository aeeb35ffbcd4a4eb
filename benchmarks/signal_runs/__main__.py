"""What process rewards, masks, minibatches and detectors are worth: each with and without, in real runs.

Everything is real: SGLang on this machine's CPU, `trainer launch`, `harness run` with process sandboxes, and a tiny
model that is made and warm-started on the spot. Prints one JSON object as the last line; docs/performance.md explains
it. Left out: other models, other tasks, and more than one repetition of a seed.
"""

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.result import provenance, write_result
from benchmarks.signal_runs.experiments import EXPERIMENTS, TARGET, WINDOW
from benchmarks.signal_runs.figures import batches_to
from benchmarks.signal_runs.learning_run import QUICK, LearningRun, RunSizes
from tests.integrity.measure import FILES, HELD_OUT, Measured, measured

UNSEEN = "held out"
"""The files of cases that the detectors were not improved with, as one."""
PARTS = ("errors", "hack", "minibatches", "detector")


def experiment(directory: Path, name: str, sizes: RunSizes, seed: int) -> dict[str, Any]:
    """Run one experiment and return its figures, with its time and the machine's load over its last 15 minutes."""
    began = time.monotonic()
    run = LearningRun(directory, EXPERIMENTS[name], sizes, seed, Console())
    try:
        figures = run.go()
    finally:
        run.close()
        run.pool.close()
    return figures | {"seconds": round(time.monotonic() - began, 1), "load_average": os.getloadavg()}


def detector() -> dict[str, dict[str, float]]:
    """Measure the detectors of reward hacking on each file of written cases in tests/integrity, and on those held out.

    Which cases they are wrong about is left out: whoever improves the detectors must not know that of `HELD_OUT`.
    """
    of_files = {file: detector_figures(measured([file])) for file in FILES}
    return of_files | {UNSEEN: detector_figures(measured(HELD_OUT))}


def detector_figures(found: Measured) -> dict[str, float]:
    return {
        "cheats": found.cheats,
        "honest": found.honest,
        "precision": found.precision,
        "recall": found.recall,
        "any_finding_precision": found.named_precision,
        "any_finding_recall": found.named_recall,
    }


def headline(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that have a bar, or that a reader asks for first."""
    figures: dict[str, Any] = {}
    if errors := parts.get("errors"):
        figures |= compared(errors, "tool_error_rate", "tool_error_rate") | compared(errors, "success", "success")
        figures["success_stderr"] = math.hypot(*(errors[run]["success_stderr"] for run in ("with", "without")))
    if hack := parts.get("hack"):
        figures |= compared(hack, "hack_rate", "hack_rate") | compared(hack, "honest_success", "honest_success")
    if batches := parts.get("minibatches"):
        figures |= {
            f"batches_to_target_{run}": batches_to(batches[run]["reward_by_step"], TARGET, WINDOW) for run in ("1", "4")
        }
        figures |= {"target": TARGET, "window": WINDOW}
    if held_out := parts.get("detector", {}).get(UNSEEN):
        figures |= {"detector_precision": held_out["precision"], "detector_recall": held_out["recall"]}
    return figures


def compared(part: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """Return a figure of the evaluations before training, after it without the setting, and after it with it."""
    return {
        f"{name}_before": part["before"][key],
        f"{name}_without": part["without"][key],
        f"{name}_with": part["with"][key],
    }


def main() -> int:
    """Run, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="two small steps each; the figures mean little")
    parser.add_argument("--seed", type=int, default=0, help="of model, tasks and their order (%(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep pools and logs in this new directory")
    parser.add_argument("--out", type=Path, help="also write the object to this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs `finally` blocks, which end the services
    sizes = QUICK if arguments.quick else RunSizes()
    figures = provenance("signal.py") | {"seed": arguments.seed, "sizes": sizes}
    began, parts = time.monotonic(), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="blackforge-signal-") as temporary:
        directory = (arguments.keep or Path(temporary)).absolute()
        for name in arguments.part or PARTS:
            if name == "detector":
                parts[name] = detector()
            else:
                parts[name] = experiment(directory / name, name, sizes, arguments.seed)
    seconds = {"seconds": round(time.monotonic() - began, 1)}
    write_result(figures | headline(parts) | seconds | {"parts": parts}, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
