"""Measure what the harness costs per attempt, whether its memory grows, and how fast a resumed run starts an attempt.

A real proxy in front of a scripted engine, process sandboxes, and an agent that makes one model call and ends. CPU time
is that of the harness's own process; agents, verifiers, proxy and engine are not counted. Prints one JSON line. Left
out: other sandboxes (benchmarks/sandboxes.py). Run it as benchmarks/harness.py.
"""

import argparse
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import func, select

from harness.cli import main as harness
from harness.run_dir import RunDir
from harness.setup.stack import ProxyOptions, RunningProxy, service
from proxy.pool.database import Pool, open_pool
from proxy.pool.schema import attempts, rollouts

KEYS = ("cpu_ms_per_attempt", "attempts_per_s", "rss_growth_mb", "rss_mb", "resume_s")
COMMAND = Path(__file__).parent / "harness.py"
AGENT = Path(__file__).parent / "one_call_agent.sh"
RESUME_TIMEOUT_SECONDS = 120
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    attempts: int = 2000
    concurrency: int = 64
    warm: int = 400
    """Attempts after which memory is first measured."""


QUICK = Sizes(attempts=60, concurrency=8, warm=20)


def scripted(prompt_text: str, prompt_ids: object) -> str:
    """What the engine answers."""
    return "Done."


def main() -> int:
    """Measure, or with the argument `inside` run the harness that is measured."""
    if sys.argv[1:2] == ["inside"]:
        return _inside(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    parser.add_argument("--out", type=Path, help="also write the object here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs `finally` blocks, which end the child processes
    figures = measure(QUICK if arguments.quick else Sizes())
    line = msgspec.json.encode(figures)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.format(line, indent=2) + b"\n")
    print(line.decode(), flush=True)
    return 0


def measure(sizes: Sizes) -> dict[str, Any]:
    """The figures by name."""
    figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
    figures["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    figures["load_average"] = round(os.getloadavg()[0], 1)  # before measuring: the load of others
    figures |= {"attempts": sizes.attempts, "concurrency": sizes.concurrency}
    with tempfile.TemporaryDirectory(prefix="harness-") as folder:
        directory = RunDir(Path(folder) / "service")
        with directory.locked(), service(ProxyOptions(script=f"{__file__}:scripted"), directory) as proxy:
            pool = open_pool(proxy.pool)
            tasks = _tasks(Path(folder) / "tasks.jsonl", sizes.attempts)
            command = ["eval", str(tasks), "--agent", "command", "--command", f"/bin/bash {AGENT}"]
            command += ["--proxy", proxy.url, "--run-dir", f"{folder}/run"]
            command += ["--sandbox", "process", "--concurrency", str(sizes.concurrency)]
            figures |= _overhead(command, pool, sizes)
            figures["resume_s"] = _resume([*command, "--epochs", "2"], pool, proxy)
            pool.close()
    return figures


def _tasks(path: Path, count: int) -> Path:
    """Write tasks whose verifier always passes."""
    task = {"instruction": "Say that you are done.", "verifier": {"command": "true"}, "limits": {"memory_mb": None}}
    path.write_bytes(b"".join(msgspec.json.encode(task | {"id": f"task-{number}"}) + b"\n" for number in range(count)))
    return path


def _overhead(command: list[str], pool: Pool, sizes: Sizes) -> dict[str, Any]:
    """Run the harness in its own process, and watch its memory from outside."""
    with _process(command) as process:
        memory = []
        while process.poll() is None:
            done = _count(pool, rollouts.c.finished_at)
            if sizes.warm <= done < sizes.attempts:
                memory.append(_rss_mb(process.pid))
            time.sleep(0.5 if sizes.attempts > 100 else 0.02)
        assert process.stdout is not None
        used = msgspec.json.decode(process.stdout.read().splitlines()[-1])
    assert _count(pool, rollouts.c.reward) == sizes.attempts, _without_verdict(pool, process.returncode)
    settled = memory[: max(1, len(memory) // 5)], memory[-max(1, len(memory) // 5) :]
    first, last = (max(part) for part in settled)
    return {
        "cpu_ms_per_attempt": round(used["cpu_s"] / sizes.attempts * 1e3, 2),
        "attempts_per_s": round(sizes.attempts / used["wall_s"], 1),
        "rss_growth_mb": round(last - first, 1),
        "rss_mb": round(last, 1),
    }


def _without_verdict(pool: Pool, status: int) -> str:
    """Why there are fewer verdicts than attempts: how the harness has ended, and the first failures of rollouts."""
    query = select(rollouts.c.failure, rollouts.c.detail).where(rollouts.c.reward.is_(None)).order_by(rollouts.c.id)
    with pool.read() as connection:
        failures = [f"{row.failure or 'not finished'} ({row.detail})" for row in connection.execute(query.limit(3))]
    return f"an attempt has no verdict; the harness ended with {status}, and of rollouts the first are: {failures}"


def _resume(command: list[str], pool: Pool, proxy: RunningProxy) -> float:
    """Seconds from the start of the command to the first new attempt of a run whose other attempts are done."""
    before, began = _count(pool, attempts.c.id), time.perf_counter()
    with _process(command):
        while _count(pool, attempts.c.id) == before:
            assert time.perf_counter() - began < RESUME_TIMEOUT_SECONDS, "the resumed run opens no attempt"
            time.sleep(0.01)
        return round(time.perf_counter() - began, 3)


@contextmanager
def _process(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the harness in its own process; ends it with the block."""
    with subprocess.Popen([sys.executable, str(COMMAND), "inside", *command], stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.terminate()
            if process.stdout is not None:
                process.stdout.read()


def _inside(command: list[str]) -> int:
    """Run the harness here, and print what it used after the start of Python."""
    before, began = _cpu_s(), time.perf_counter()
    status = harness(command)
    used = {"cpu_s": _cpu_s() - before, "wall_s": time.perf_counter() - began, "threads": threading.active_count()}
    print(msgspec.json.encode(used).decode())
    return status


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _rss_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 2**20
    except (OSError, IndexError):  # the process has just ended
        return 0.0


def _count(pool: Pool, column: Any) -> int:
    with pool.read() as connection:
        return connection.scalar(select(func.count(column))) or 0
