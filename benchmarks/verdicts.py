"""Measures what a verdict costs in a fresh sandbox, against one in the sandbox that the agent worked in.

Part of `python benchmarks/sandboxes.py`. An agent that writes one file has ended, and nothing else runs; the clock runs
from there to the verdict. Fresh and shared ones alternate. `fresh_verifier_ms` is what the fresh one takes beyond the
verifier itself, so it is compared with `start_ms`, one more start of a container.
"""

import time
from statistics import median

import msgspec

from harness.environment.snapshot import set_up, spec_of, take_snapshot
from harness.tasks import Task
from harness.verdict.isolation import verifier_sandbox
from harness.verdict.verifier import verify
from sandboxes.base import Limits
from sandboxes.docker.backend import DockerSandboxes

TASK = {
    "id": "hello", "instruction": "Write hello.txt", "network": "none", "setup": "mkdir src && echo x > src/x",
    "limits": {"memory_mb": 256, "pids": 64, "disk_mb": 16},
}  # fmt: skip


async def verdicts(sandboxes: DockerSandboxes, image: str, times: int) -> dict[str, float]:
    """Median milliseconds: a verdict in either place, a start, and what a fresh verdict adds to its verifier."""
    taken: dict[str, list[float]] = {"fresh": [], "shared": [], "start": [], "verifier": []}
    for _ in range(times):
        for where in ("fresh", "shared"):
            verifier = {"command": "test -e hello.txt", "where": where}
            task = msgspec.convert(TASK | {"image": {"name": image}, "verifier": verifier}, Task)
            await _judged(sandboxes, task, taken)
    figures = {f"{name}_ms": median(values) * 1e3 for name, values in taken.items()}
    return {
        "fresh_verifier_ms": figures["fresh_ms"] - figures["verifier_ms"],
        "shared_verifier_ms": figures["shared_ms"] - figures["verifier_ms"],
        "start_ms": figures["start_ms"],
        "fresh_verifier_starts": (figures["fresh_ms"] - figures["verifier_ms"]) / figures["start_ms"],
    }


async def _judged(sandboxes: DockerSandboxes, task: Task, taken: dict[str, list[float]]) -> None:
    began = time.perf_counter()
    sandbox = await sandboxes.start(spec_of(task))
    taken["start"].append(time.perf_counter() - began)
    try:
        await set_up(sandbox, task)
        snapshot = await take_snapshot(sandbox, task, sandboxes)
        await sandbox.run("echo hello > hello.txt", Limits(), {})
        began = time.perf_counter()
        async with verifier_sandbox(sandboxes, sandbox, task, snapshot) as (room, _):
            ready = time.perf_counter()
            verdict = await verify(room, task)
            ended = time.perf_counter()
        assert verdict.reward == 1.0
    finally:
        await sandbox.stop()
    taken["verifier"].append(ended - ready)
    taken["fresh" if snapshot.fresh else "shared"].append(ended - began)
