"""Spare containers: there before they are asked for, handed out once, of the image that is wanted now."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandboxes.base import Image, Limits, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.labels import PID
from sandboxes.docker.warm_pool import WarmPool
from tests.daemons import said

ROOT = Path(__file__).parents[3]
BUSYBOX = Spec(image=Image(name="bb:1"), network="none", profile="harbor")


@asynccontextmanager
async def warm(daemon: str, count: int = 2) -> AsyncIterator[WarmPool]:
    pool = WarmPool(await DockerSandboxes.open(Options(address=daemon)), count)
    try:
        yield pool
    finally:
        await pool.close()
    assert mine() == set()


def mine() -> set[str]:
    return set(said("ps", "--all", "--filter", f"label={PID}={os.getpid()}", "--format", "{{.Names}}").split())


async def stocked(pool: WarmPool, spares: int, containers: int) -> set[str]:
    """The names of all containers, once there are so many, so many of them spare."""
    deadline = time.monotonic() + 120
    while pool.spares != spares or len(names := mine()) != containers:
        assert time.monotonic() < deadline, (pool.spares, mine())
        await asyncio.sleep(0.05)
    return names


@pytest.fixture
def changing(docker_daemon: str) -> Iterator[str]:
    """The name of an image that can be given to another one."""
    name = f"blackforge-test-changing:{os.getpid()}"
    said("tag", "bb:1", name)
    yield name
    said("image", "rm", "--force", name)


async def test_spare_ones_are_there_before_they_are_asked_for_and_handed_out_once(docker_daemon: str) -> None:
    async with warm(docker_daemon) as pool:
        await pool.start(BUSYBOX)
        spare = await stocked(pool, 2, 3)
        first = [await pool.start(BUSYBOX) for _ in range(2)]
        assert {one.container for one in first} <= spare
        more = await asyncio.gather(*(pool.start(BUSYBOX) for _ in range(5)))
        assert len({one.id for one in [*first, *more]}) == 7
        assert (await more[-1].run("echo here", Limits(), {})).output == "here\n"
        await stocked(pool, 2, 10)


async def test_another_spec_has_its_own_and_a_dead_one_is_not_handed_out(docker_daemon: str) -> None:
    async with warm(docker_daemon, 1) as pool:
        cold = await pool.start(BUSYBOX)
        (spare,) = await stocked(pool, 1, 2) - {cold.container}
        other = await pool.start(Spec(image=BUSYBOX.image, network="none", profile="harbor", memory_mb=64))
        assert other.container != spare
        said("kill", spare)
        assert (await pool.start(BUSYBOX)).container != spare
        await stocked(pool, 2, 5)
        assert spare not in mine()


async def test_when_the_image_changes_the_spare_ones_go(docker_daemon: str, changing: str) -> None:
    async with warm(docker_daemon, 1) as pool:
        spec = Spec(image=Image(name=changing), network="none", profile="harbor")
        cold = await pool.start(spec)
        (spare,) = await stocked(pool, 1, 2) - {cold.container}
        said("commit", "--change", "ENV NEW=yes", spare, changing)
        fresh = await pool.start(spec)
        assert (await fresh.run("echo $NEW", Limits(), {})).output == "yes\n"
        await stocked(pool, 1, 3)
        assert spare not in mine()


@pytest.mark.long
def test_the_benchmark_prints_one_line_of_json(docker_daemon: str) -> None:
    command = [sys.executable, "-m", "benchmarks.warm", "--starts", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["start_ms"] > 0 and figures["warm_start_ms"] > 0 and figures["warm_gain"] > 0


async def test_a_start_that_is_given_up_while_its_spare_one_is_looked_at_leaves_none(docker_daemon: str) -> None:
    async with warm(docker_daemon, 1) as pool:
        first = await pool.start(BUSYBOX)
        await stocked(pool, 1, 2)
        giving_up = asyncio.create_task(pool.start(BUSYBOX))
        async with asyncio.timeout(60):
            while pool.spares:  # from now on it is being looked at
                await asyncio.sleep(0)
        giving_up.cancel()
        await asyncio.wait({giving_up})
        assert giving_up.cancelled()
        await first.stop()
        await stocked(pool, 1, 1)
