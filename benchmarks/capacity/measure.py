"""The measurements, each by the parts of the benchmark that looks at that part of the system alone."""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import func, select, text

from benchmarks import gateway
from benchmarks.capacity.writers import commit_rates
from benchmarks.cycles import cycle, cycles_per_second
from benchmarks.pool import fill, finish_group
from proxy.pool.database import Pool, open_pool
from proxy.pool.schema import completions
from proxy.pool.training.steps import Published, latest, publish
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from sandboxes.base import Image, Spec
from sandboxes.docker.backend import DockerSandboxes, Options

STEP = Published(step=0, checkpoint="c", hf_dir="h", metrics={})


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    conversations: gateway.Sizes = gateway.Sizes()
    processes: tuple[int, ...] = (1, 2, 4)
    commits: int = 6400
    """Completions of each process."""
    rows: int = 1_000_000
    leases: int = 5
    members: int = 8
    calls: int = 8
    batch: int = 96
    """Sandboxes that are started, asked and removed at the same time."""


QUICK = Sizes(gateway.QUICK, (1,), commits=64, rows=1000, leases=1, members=2, calls=2, batch=4)


def of_gateway(sizes: Sizes) -> dict[str, Any]:
    """Return what one process of the gateway can do, from the CPU time of a call in conversations that grow."""
    figures = gateway.measure(sizes.conversations, ["conversations"], None)
    mean = figures["cpu_ms_mean_50_turns"]
    return {
        "gateway_cpu_ms_per_call": mean,
        "gateway_calls_per_s": 1000 / mean,
        "new_tokens_per_call": figures["new_tokens_per_call_32k"],
        "sqlite_bytes_per_completion": figures["bytes_per_call_32k"],
    }


def of_database(url: str, sizes: Sizes) -> dict[str, Any]:
    """Return what a PostgreSQL can do beside many old groups: leases, then commits."""
    pool = open_pool(url)
    try:
        leased = _leases(pool, sizes)
        before, rows = _bytes(pool), _rows(pool)
        rates = commit_rates(url, sizes.processes, sizes.commits)
        size = (_bytes(pool) - before) / (_rows(pool) - rows)
        return leased | {
            "pool_completions_per_s": max(rates.values()),
            "pool_completions_per_s_by_processes": {str(number): rate for number, rate in rates.items()},
            "bytes_per_completion": size,
        }
    finally:
        pool.close()


def _bytes(pool: Pool) -> int:
    with pool.read() as connection:
        return connection.scalar(text("select pg_database_size(current_database())")) or 0


def _rows(pool: Pool) -> int:
    with pool.read() as connection:
        return connection.scalar(select(func.count()).select_from(completions)) or 0


def _leases(pool: Pool, sizes: Sizes) -> dict[str, Any]:
    """Time steps of 8 groups: the lease with all of its completions, and the publishing of the step."""
    run_id = fill(pool, sizes.rows)
    version = latest(pool, run_id)
    assert version is not None
    rule = LeaseRule(groups=8, window=8 * sizes.leases, max_staleness=99)
    for _ in range(8 * sizes.leases):
        finish_group(pool, run_id, version.name, members=sizes.members, calls=sizes.calls, tokens=332)
    taken = []
    for _ in range(sizes.leases):
        began = time.perf_counter()
        leased = lease(pool, run_id, version.step + 1, rule)
        assert leased is not None and len(leased.groups) == rule.groups
        version = publish(pool, run_id, replace(STEP, step=version.step + 1, parent=version.id))
        taken.append(time.perf_counter() - began)
    seconds = sum(taken) / len(taken)
    return {
        "rows": sizes.rows,
        "leases_per_s": 1 / seconds,
        "leased_groups_per_s": rule.groups / seconds,
        "leased_completions_per_group": sizes.members * sizes.calls,
    }


def of_sandboxes(sizes: Sizes, image: str) -> dict[str, Any]:
    """Return how many sandboxes one Docker daemon starts, asks and removes in a second."""
    return {"sandbox_cycles_per_s": asyncio.run(_sandboxes(sizes.batch, image))}


async def _sandboxes(batch: int, image: str) -> float:
    sandboxes = await DockerSandboxes.open(Options(run="benchmark"))
    spec = Spec(image=Image(name=image), network="none", memory_mb=256, pids=64, disk_mb=16)
    try:
        await cycle(sandboxes, spec)  # prepares the image
        return await cycles_per_second(sandboxes, spec, batch)
    finally:
        await sandboxes.close()
