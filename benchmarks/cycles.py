"""Measure what a Docker sandbox costs compared with the bare client: one JSON object as the last line, and in --out.

A cycle is create, start, one command, remove. Our sandboxes and bare containers of the same image and network, through
the same client library, alternate, so that both see the same machine. Left out: the model's channel and agents'
bundles; image builds, which happen once.
"""

import argparse
import asyncio
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from benchmarks.verdicts import verdicts
from sandboxes.base import Image, Limits, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.container.sandbox import DockerSandbox
from sandboxes.docker.daemon import ContainerCommand
from sandboxes.docker.labels import PID, labels_of, this_process

LIMITS = Limits(seconds=300)
HARDENED = {
    "NetworkMode": "none", "ReadonlyRootfs": True, "CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"],
    "Memory": 256 << 20, "PidsLimit": 64, "Init": True, "Tmpfs": {"/tmp": "size=16m"},
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    cycles: int = 30
    batch: int = 48
    concurrent: int = 200


QUICK = Sizes(cycles=2, batch=4, concurrent=4)


async def measure(sizes: Sizes, image: str) -> dict[str, Any]:
    """The figures by name."""
    sandboxes = await DockerSandboxes.open(Options(run="benchmark"))
    spec = Spec(image=Image(name=image), network="none", memory_mb=256, pids=64, disk_mb=16)
    try:
        await cycle(sandboxes, spec)  # prepares the image
        figures = await side_by_side(sandboxes, spec, sizes.cycles)
        figures |= await verdicts(sandboxes, image, sizes.cycles)
        figures["cycles_per_s"] = await cycles_per_second(sandboxes, spec, sizes.batch)
        return figures | await crowd(sandboxes, spec, sizes.concurrent)
    finally:
        await sandboxes.close()


async def side_by_side(sandboxes: DockerSandboxes, spec: Spec, cycles: int) -> dict[str, Any]:
    """Median milliseconds of single cycles (ours, bare, and bare with limits), and their ratios."""
    times: dict[str, list[float]] = {"ours": [], "bare": [], "hardened": []}
    cpu = 0.0
    for _ in range(cycles):
        before = time.process_time()
        times["ours"].append(await timed(cycle(sandboxes, spec)))
        cpu += time.process_time() - before
        times["bare"].append(await timed(bare_cycle(sandboxes, spec, {"NetworkMode": "none"})))
        times["hardened"].append(await timed(bare_cycle(sandboxes, spec, HARDENED)))
    figures: dict[str, Any] = {f"{name}_cycle_ms": median(values) * 1e3 for name, values in times.items()}
    figures["cycle_ratio"] = figures["ours_cycle_ms"] / figures["bare_cycle_ms"]
    figures["hardened_ratio"] = figures["ours_cycle_ms"] / figures["hardened_cycle_ms"]
    figures["client_cpu_ms_per_cycle"] = cpu / cycles * 1e3
    return figures


async def timed(doing: Any) -> float:
    """Seconds until an awaitable is done."""
    began = time.perf_counter()
    await doing
    return time.perf_counter() - began


async def cycle(sandboxes: DockerSandboxes, spec: Spec) -> None:
    """One cycle of our sandboxes."""
    sandbox = await sandboxes.start(spec)
    try:
        result = await sandbox.run("true", LIMITS, {})
        assert result.exit_code == 0, result
    finally:
        await sandbox.stop()


async def cycles_per_second(sandboxes: DockerSandboxes, spec: Spec, batch: int) -> float:
    """The rate of `batch` cycles that run at the same time."""
    began = time.perf_counter()
    await asyncio.gather(*(cycle(sandboxes, spec) for _ in range(batch)))
    return batch / (time.perf_counter() - began)


async def bare_cycle(sandboxes: DockerSandboxes, spec: Spec, host: dict[str, Any]) -> None:
    """One cycle of a bare container with this HostConfig."""
    assert spec.image is not None
    labels = labels_of("benchmark", this_process())
    config: dict[str, Any] = {"Image": spec.image.name, "Cmd": ["sleep", "86400"], "Labels": labels, "HostConfig": host}
    container = await sandboxes.daemon.docker.containers.create(config)
    try:
        await container.start()
        command = ContainerCommand(argv=("/bin/sh", "-c", "true"), user="")
        assert await sandboxes.daemon.execute(container.id, command, lambda output: None) == 0
    finally:
        await container.delete(force=True)


async def crowd(sandboxes: DockerSandboxes, spec: Spec, size: int) -> dict[str, Any]:
    """Start `size` sandboxes at once, count those that run a command while all are up, and remove them."""
    began = time.perf_counter()
    started = await asyncio.gather(*(sandboxes.start(spec) for _ in range(size)), return_exceptions=True)
    up = [sandbox for sandbox in started if isinstance(sandbox, DockerSandbox)]
    starting = time.perf_counter() - began
    running = await sandboxes.daemon.docker.containers.list(
        filters={"label": [f"{PID}={os.getpid()}"], "status": ["running"]}
    )
    began = time.perf_counter()
    results = await asyncio.gather(*(sandbox.run("true", LIMITS, {}) for sandbox in up))
    commands = time.perf_counter() - began
    answering = sum(result.exit_code == 0 for result in results)
    began = time.perf_counter()
    await asyncio.gather(*(sandbox.stop() for sandbox in up))
    return {
        "concurrent": min(len(running), answering),
        "concurrent_start_s": starting,
        "concurrent_commands_s": commands,
        "concurrent_remove_s": time.perf_counter() - began,
    }


def main() -> int:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds; the figures mean little")
    parser.add_argument("--image", default="bb:1", help="what the sandboxes start from (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the object here")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
    figures["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    figures["load_average"] = round(os.getloadavg()[0], 1)  # before measuring: the load of others
    figures |= asyncio.run(measure(QUICK if arguments.quick else Sizes(), arguments.image))
    line = msgspec.json.encode(figures)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.format(line, indent=2) + b"\n")
    print(line.decode(), flush=True)
    return 0
