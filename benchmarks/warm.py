"""Measure how much of a sandbox's start a stock of spare containers hides: one JSON object as the last line of output.

`python -m benchmarks.warm`. Starts with and without a stock alternate, so that both see the same machine. The stock is
full at each start, so this is the best case: starts that come faster than spares are made take as long as without.
"""

import argparse
import asyncio
import os
import platform
import time
from statistics import median
from typing import Any

import msgspec

from sandboxes.base import Image, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.warm_pool import WarmPool


async def measure(starts: int, image: str) -> dict[str, float]:
    """Median milliseconds from the request for a sandbox until it is there."""
    spec = Spec(image=Image(name=image), network="none", memory_mb=256, pids=64, disk_mb=16)
    plain = await DockerSandboxes.open(Options(run="benchmark"))
    stocked = WarmPool(await DockerSandboxes.open(Options(run="benchmark")), 1)
    times: dict[str, list[float]] = {"start_ms": [], "warm_start_ms": []}
    try:
        await (await stocked.start(spec)).stop()
        for _ in range(starts):
            times["start_ms"].append(await timed(plain, spec))
            while not stocked.spares:
                await asyncio.sleep(0.01)
            times["warm_start_ms"].append(await timed(stocked, spec))
    finally:
        await stocked.close()
        await plain.close()
    medians = {name: median(values) * 1e3 for name, values in times.items()}
    return medians | {"warm_gain": medians["start_ms"] / medians["warm_start_ms"]}


async def timed(sandboxes: DockerSandboxes | WarmPool, spec: Spec) -> float:
    """Seconds that one start takes."""
    began = time.perf_counter()
    sandbox = await sandboxes.start(spec)
    seconds = time.perf_counter() - began
    await sandbox.stop()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20, help="with and without a stock each (%(default)s)")
    parser.add_argument("--image", default="bb:1", help="what the sandboxes start from (%(default)s)")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "starts": arguments.starts}
    figures["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    figures["load_average"] = round(os.getloadavg()[0], 1)
    print(msgspec.json.encode(figures | asyncio.run(measure(arguments.starts, arguments.image))).decode())


if __name__ == "__main__":
    main()
