"""Measure what harness and trainer take of a core while each waits for the other, beside a million old groups.

A real harness whose queue is full, on SQLite and on PostgreSQL, and the lease that a trainer asks for every 2 seconds.
One JSON object is the last line of output. Left out: proxy, engine and PostgreSQL, which are processes of their own.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import attempts
from benchmarks.pool import RUN, fill
from proxy.pool.database import Pool, open_pool
from proxy.pool.rollouts.runs import find_run, set_queue_limit
from proxy.pool.training.steps import latest
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from tests.postgres import binaries, running

TASK = {"id": "t", "instruction": "do nothing", "verifier": {"command": "true"}}
WAITS = "the trainer's limit"
"""What a harness says while it waits for room in the queue."""
LEASE_SECONDS = 2.0
"""Between two leases that a trainer asks for, once it has waited for 100 seconds (trainer/run_state.py)."""
END_SECONDS = 400
TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="old groups in the pool (%(default)s)")
    parser.add_argument("--seconds", type=float, default=40, help="to wait before measuring, and to measure (40)")
    parser.add_argument("--quick", action="store_true", help="few rows and seconds; the figures mean little")
    parser.add_argument("--out", type=Path, help="also write the object here")
    arguments = parser.parse_args()
    rows, seconds = (1000, 4.0) if arguments.quick else (arguments.rows, arguments.seconds)
    figures: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["benchmarks/waiting.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_average": round(os.getloadavg()[0], 1),  # before measuring: the load of others
        "rows": rows,
        "seconds": seconds,
    }
    with tempfile.TemporaryDirectory() as directory:
        figures |= _waiting(f"{directory}/pool.db", rows, seconds)
    if programs := binaries():
        with running(programs, durable=True) as server:
            figures |= _waiting(server.database(), rows, seconds)
    line = msgspec.json.encode(figures)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.format(line, indent=2) + b"\n")
    print(line.decode(), flush=True)
    return 0


def _waiting(url: str, rows: int, seconds: float) -> dict[str, float]:
    with ExitStack() as stack:
        pool = open_pool(url)
        stack.callback(pool.close)
        run_id = fill(pool, rows)
        shares = {"harness": harness_share(pool, seconds), "trainer": trainer_share(pool, run_id, seconds)}
        return {f"waiting_{who}_share_{pool.dialect}": share for who, share in shares.items()}


def harness_share(pool: Pool, seconds: float) -> float:
    """CPU time over time of a harness that feeds a run whose queue is full, once it has waited this long."""
    set_queue_limit(pool, find_run(pool, RUN).id, 0)
    with tempfile.TemporaryDirectory() as directory:
        tasks = Path(directory) / "tasks.jsonl"
        tasks.write_text(json.dumps(TASK) + "\n")
        command = [sys.executable, "-m", "harness", "run", str(tasks), "--agent", "command", "--command", "true"]
        command += ["--sandbox", "process", "--scripted", f"{attempts.__file__}:scripted", "--pool", pool.url]
        command += ["--name", RUN, "--run-dir", f"{directory}/run", "--until-step", "1000000000"]
        harness = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert harness.stdout is not None
            said: list[str] = []
            while WAITS not in "".join(said[-1:]):
                said.append(harness.stdout.readline())
                if not said[-1]:
                    raise RuntimeError(f"the harness ended before it waited: {''.join(said)}")
            time.sleep(seconds)
            before, began = _cpu_seconds(harness.pid), time.monotonic()
            time.sleep(seconds)
            return (_cpu_seconds(harness.pid) - before) / (time.monotonic() - began)
        finally:
            harness.send_signal(signal.SIGTERM)
            harness.communicate(timeout=END_SECONDS)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def trainer_share(pool: Pool, run_id: int, seconds: float) -> float:
    """CPU time over time of the leases that a trainer asks for while no group has finished."""
    version = latest(pool, run_id)
    assert version is not None
    rule = LeaseRule(groups=8, window=32, max_staleness=8)
    lease(pool, run_id, version.step + 1, rule)  # the first one builds statements
    cpu, began = time.process_time(), time.monotonic()
    while time.monotonic() < began + seconds:
        time.sleep(LEASE_SECONDS)
        assert lease(pool, run_id, version.step + 1, rule) is None
    return (time.process_time() - cpu) / (time.monotonic() - began)
