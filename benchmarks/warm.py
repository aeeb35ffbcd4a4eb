"""What a stock of spare containers hides of a sandbox's start: one JSON object as the last line.

`python -m benchmarks.warm`. Starts with and without a stock take turns, so that both see the same machine. The stock is
full when it is asked, so this is the best case: starts that come faster than spares are made take as long as ever.
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
from sandboxes.docker.warm_pool import Warm


async def measure(starts: int, image: str) -> dict[str, float]:
    """Medians in milliseconds: from asking until there is a sandbox."""
    spec = Spec(image=Image(name=image), network="none", memory_mb=256, pids=64, disk_mb=16)
    plain = await DockerSandboxes.open(Options(run="benchmark"))
    stocked = Warm(await DockerSandboxes.open(Options(run="benchmark")), 1)
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
    found = {name: median(values) * 1e3 for name, values in times.items()}
    return found | {"warm_gain": found["start_ms"] / found["warm_start_ms"]}


async def timed(sandboxes: DockerSandboxes | Warm, spec: Spec) -> float:
    began = time.perf_counter()
    sandbox = await sandboxes.start(spec)
    took = time.perf_counter() - began
    await sandbox.stop()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20, help="with and without a stock each (%(default)s)")
    parser.add_argument("--image", default="bb:1", help="what the sandboxes start from (%(default)s)")
    given = parser.parse_args()
    found: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "starts": given.starts}
    found["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    found["load_average"] = round(os.getloadavg()[0], 1)
    print(msgspec.json.encode(found | asyncio.run(measure(given.starts, given.image))).decode())


if __name__ == "__main__":
    main()
