"""The processes and machines of a pool: proxies, harnesses, trainers with the phases of their steps, sandbox hosts."""

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Connection, select

from proxy.pool.browse.run_dirs import run_directories
from proxy.pool.browse.runs import RunEntry, number, runs_page
from proxy.pool.browse.snapshot import snapshot
from proxy.pool.browse.steps import of_steps, step_range
from proxy.pool.browse.traffic import RunTraffic, traffic_of
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.input_files import open_input
from proxy.pool.processes.owners import PoolProcess, database_time, is_alive, this_process
from proxy.pool.schema import policy_versions, proxies, train_steps
from proxy.pool.training.steps import PHASES

MOST_PROXIES = 50
NEWEST_STEPS = 24
"""Steps of a run whose phases are shown."""
METRICS = "metrics.prom"
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class ProxyEntry:
    """A proxy that serves the pool, or did."""

    id: int
    host: str
    pid: int
    alive: bool
    silent_seconds: float
    ended_at: float | None
    tokenizer: str | None


@dataclass(frozen=True)
class StepPhases:
    """The seconds of each phase of a step. Those up to the report are before its publishing, the push after it."""

    step: int
    published_at: float
    pushed_at: float | None
    seconds: dict[str, float]
    tokens_per_second: float | None
    mtp_length: float | None
    """Tokens that a draft of the engine is expected to yield; None: no head is trained."""


@dataclass(frozen=True)
class SandboxHost:
    """Sandboxes on one host, as the run's harness counts them."""

    run: str
    host: str
    starting: float
    live: float
    stopping: float
    failures: float
    start_seconds: float | None
    """Mean time to a running sandbox."""
    file: str
    written_at: float


@dataclass(frozen=True)
class Machines:
    """What is known of the machines."""

    runs: list[RunEntry]
    proxies: list[ProxyEntry]
    phases: dict[str, list[StepPhases]]
    """Phases per run."""
    hosts: list[SandboxHost]
    traffic: list[RunTraffic]
    traffic_of: int


def machines(pool: Pool) -> Machines:
    """Look at the processes and machines of a pool."""
    entries = runs_page(pool)
    with snapshot(pool) as connection:
        now = database_time(connection, pool)
        rows = connection.execute(select(proxies).order_by(proxies.c.id.desc()).limit(MOST_PROXIES)).all()
        phases = {entry.name: _phases(connection, entry.id) for entry in entries if entry.step is not None}
        counted, traffic = traffic_of(connection, {entry.id: entry.name for entry in entries})
    known = []
    for row in rows:
        process, silent = msgspec.convert(row.owner, PoolProcess), now - row.seen_at
        alive = row.ended_at is None and is_alive(process, this_process(), silent)
        known.append(ProxyEntry(row.id, process.host, process.pid, alive, silent, row.ended_at, row.tokenizer))
    hosts = [host for entry in entries if entry.harness is not None for host in _hosts(pool, entry.name)]
    return Machines(entries, known, {name: steps for name, steps in phases.items() if steps}, hosts, traffic, counted)


def _phases(connection: Connection, run_id: int) -> list[StepPhases]:
    bounds = step_range(connection, run_id)
    if bounds is None:
        return []
    wanted = list(range(max(1, bounds[1] - NEWEST_STEPS + 1), bounds[1] + 1))
    columns = (policy_versions.c.step, policy_versions.c.created_at, policy_versions.c.pushed_at, train_steps.c.metrics)
    return [
        StepPhases(
            step=row.step,
            published_at=row.created_at,
            pushed_at=row.pushed_at,
            seconds={
                name: seconds
                for name in PHASES
                if (seconds := number((row.metrics.get("seconds") or {}).get(name))) is not None
            },
            tokens_per_second=number(row.metrics.get("tokens_per_second")),
            mtp_length=number(row.metrics.get("mtp_length")),
        )
        for row in of_steps(connection, run_id, wanted, columns)
    ]


def _hosts(pool: Pool, run: str) -> list[SandboxHost]:
    """Return the sandbox hosts that a run's directory tells of."""
    for directory in run_directories(pool, run):
        file = directory / METRICS
        with suppress(OSError, ValueError, UserError):
            return _of_file(run, file)
    return []


def _of_file(run: str, file: Path) -> list[SandboxHost]:
    with open_input(file, follow=False) as opened:
        text = opened.read(MOST_BYTES).decode(errors="replace")
        written = os.fstat(opened.fileno()).st_mtime
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "host" in sample.labels and "le" not in sample.labels:
                sums[sample.labels["host"]][sample.name] += sample.value
    return [_host(run, host, values, str(file), written) for host, values in sorted(sums.items())]


def _host(run: str, host: str, values: dict[str, float], file: str, written: float) -> SandboxHost:
    started = values["blackforge_sandbox_start_seconds_count"]
    return SandboxHost(
        run=run,
        host=host,
        starting=values["blackforge_sandboxes_starting"],
        live=values["blackforge_sandboxes_live"],
        stopping=values["blackforge_sandboxes_stopping"],
        failures=values["blackforge_sandbox_failures_total"],
        start_seconds=values["blackforge_sandbox_start_seconds_sum"] / started if started else None,
        file=file,
        written_at=written,
    )
