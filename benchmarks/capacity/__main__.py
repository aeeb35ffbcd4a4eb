"""Measure what each part can do on this machine, and what a million rollouts a day would need of it.

One JSON object is the last line of output, and stands in --out. PostgreSQL is measured at --url, or in a server of its
own that is started from Debian's binaries, with fsync. A part that cannot be measured here is null, with the reason.
Left out: engines and the trainer's arithmetic, whose ceiling is that of their GPUs.
"""

import argparse
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.capacity.estimate import Load, estimate
from benchmarks.capacity.measure import QUICK, Sizes, of_database, of_gateway, of_sandboxes
from sandboxes.base import SandboxError
from tests.postgres import binaries, running

PARTS = ("gateway", "pool", "sandboxes")
MEASURED = (
    "gateway_cpu_ms_per_call", "gateway_calls_per_s", "new_tokens_per_call", "sqlite_bytes_per_completion",
    "pool_completions_per_s", "bytes_per_completion", "leases_per_s", "leased_groups_per_s",
    "sandbox_cycles_per_s",
)  # fmt: skip


def main() -> int:
    """Measure, compute and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--url", help="an empty PostgreSQL database")
    parser.add_argument("--image", default="bb:1", help="what the sandboxes start from (%(default)s)")
    parser.add_argument("--rollouts", type=int, default=Load.rollouts_a_day, help="rollouts a day (%(default)s)")
    parser.add_argument("--calls", type=int, default=Load.calls_per_rollout, help="calls per rollout (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the object here")
    arguments = parser.parse_args()
    sizes, began = QUICK if arguments.quick else Sizes(), time.monotonic()
    figures: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["benchmarks/ceilings.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_average": round(os.getloadavg()[0], 1),  # before measuring: the load of others
    } | dict.fromkeys(MEASURED)
    for part in arguments.parts.split(","):
        print(f"{part} ...", file=sys.stderr, flush=True)
        if part == "gateway":
            figures |= of_gateway(sizes)
        elif part == "pool":
            figures |= _of_database(arguments.url, sizes)
        else:
            try:
                figures |= of_sandboxes(sizes, arguments.image)
            except SandboxError as error:
                figures["sandboxes_reason"] = str(error)
    load = Load(rollouts_a_day=arguments.rollouts, calls_per_rollout=arguments.calls)
    figures |= estimate(load, figures) | {"seconds": round(time.monotonic() - began, 1)}
    line = msgspec.json.encode(figures)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.format(line, indent=2) + b"\n")
    print(line.decode(), flush=True)
    return 0


def _of_database(url: str | None, sizes: Sizes) -> dict[str, Any]:
    if url:
        return of_database(url, sizes)
    installed = binaries()
    if installed is None:
        return {"pool_reason": "PostgreSQL is not installed; install it, or name an empty database with --url"}
    with running(installed, durable=True) as server:
        return of_database(server.database(), sizes)


if __name__ == "__main__":
    sys.exit(main())
