"""Measures what a verdict costs in a fresh sandbox, against one in the sandbox that the agent worked in.

Part of `python benchmarks/sandboxes.py`. An agent that writes one file has ended, and nothing else runs; the clock runs
from there to the verdict. Fresh and shared ones alternate. `fresh_verifier_ms` is what the fresh one takes beyond the
verifier itself, so it is compared with `start_ms`, one more start of a container. `fresh_verifier_warm_ms` is the same
where a spare container is ready (`--warm 1`), as it is after an agent that has worked for a second.
"""

import asyncio
import time
from statistics import median

import msgspec

from harness.environment.snapshot import set_up, spec_of, take_snapshot
from harness.tasks import Task
from harness.verdict.isolation import verifier_sandbox
from harness.verdict.verifier import verify
from sandboxes.base import Limits
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.warm_pool import WarmPool

TASK = {
    "id": "hello", "instruction": "Write hello.txt", "network": "none", "setup": "mkdir src && echo x > src/x",
    "limits": {"memory_mb": 256, "pids": 64, "disk_mb": 16},
}  # fmt: skip
KINDS = 2
"""Of sandboxes that a task has: its agent's and its verifier's. One spare of each is kept."""


async def verdicts(sandboxes: DockerSandboxes, image: str, times: int) -> dict[str, float]:
    """Median milliseconds: a verdict in either place, a start, and what a fresh verdict adds to its verifier."""
    taken: dict[str, list[float]] = {"fresh": [], "shared": [], "warm": [], "start": [], "verifier": []}
    warm = WarmPool(await DockerSandboxes.open(Options(run="benchmark")), 1)
    try:
        await _judged(warm, _task(image, "fresh"), {})  # asks for spares of either kind
        for _ in range(times):
            await _stocked(warm)  # so that no start of a spare one disturbs what is measured
            for where in ("fresh", "shared"):
                await _judged(sandboxes, _task(image, where), taken)
            await _judged(warm, _task(image, "fresh"), taken)
    finally:
        await warm.close()
    figures = {f"{name}_ms": median(values) * 1e3 for name, values in taken.items()}
    added = {name: figures[f"{name}_ms"] - figures["verifier_ms"] for name in ("fresh", "shared", "warm")}
    return {
        "fresh_verifier_ms": added["fresh"],
        "fresh_verifier_warm_ms": added["warm"],
        "shared_verifier_ms": added["shared"],
        "start_ms": figures["start_ms"],
        "fresh_verifier_starts": added["fresh"] / figures["start_ms"],
        "fresh_verifier_warm_starts": added["warm"] / figures["start_ms"],
    }


def _task(image: str, where: str) -> Task:
    verifier = {"command": "test -e hello.txt", "where": where}
    return msgspec.convert(TASK | {"image": {"name": image}, "verifier": verifier}, Task)


async def _judged(sandboxes: DockerSandboxes | WarmPool, task: Task, taken: dict[str, list[float]]) -> None:
    began = time.perf_counter()
    sandbox = await sandboxes.start(spec_of(task))
    started = time.perf_counter() - began
    try:
        await set_up(sandbox, task)
        snapshot = await take_snapshot(sandbox, task, sandboxes)
        await sandbox.run("echo hello > hello.txt", Limits(), {})
        if isinstance(sandboxes, WarmPool) and taken:
            await _stocked(sandboxes)
        began = time.perf_counter()
        async with verifier_sandbox(sandboxes, sandbox, task, snapshot) as (room, _):
            ready = time.perf_counter()
            verdict = await verify(room, task)
            ended = time.perf_counter()
        assert verdict.reward == 1.0
    finally:
        await sandbox.stop()
    if not taken:
        return
    if isinstance(sandboxes, WarmPool):
        taken["warm"].append(ended - began)
        return
    taken["start"].append(started)
    taken["verifier"].append(ended - ready)
    taken["fresh" if snapshot.fresh else "shared"].append(ended - began)


async def _stocked(warm: WarmPool) -> None:
    """Wait until there is a spare container of each kind."""
    async with asyncio.timeout(300):
        while warm.spares < KINDS:
            await asyncio.sleep(0.01)
