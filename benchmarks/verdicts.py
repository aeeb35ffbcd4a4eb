"""Measures what a verdict costs in a fresh sandbox, against one in the sandbox that the agent worked in.

Part of `python benchmarks/sandboxes.py`. An agent that writes one file has ended, and nothing else runs; the clock runs
from there to the verdict (`*_verifier_ms`) and to the end of all removals (`*_removed_ms`). In each round a fresh one,
a shared one and a fresh one with a spare container (`--warm 1`) follow each other. `start_ms` is one more container of
the agent's spec in the same rounds: create, start and a first command.

A shared verdict restarts the agent's container, which is as dear as a start. So two figures compare the two:
`fresh_over_shared_ms` is how much longer an attempt takes because its verdict is fresh, and `fresh_extra_starts` what
the fresh verdict takes beyond a shared one without its restart, in starts.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import msgspec

from harness.environment.snapshot import set_up, spec_of, take_snapshot
from harness.tasks import Task
from harness.verdict.isolation import verifier_sandbox
from harness.verdict.verifier import verify
from sandboxes.base import Limits, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.container.sandbox import DockerSandbox
from sandboxes.docker.warm_pool import WarmPool

TASK = {
    "id": "hello", "instruction": "Write hello.txt", "network": "none", "setup": "mkdir src && echo x > src/x",
    "limits": {"memory_mb": 256, "pids": 64, "disk_mb": 16},
}  # fmt: skip
KINDS = 2
"""Of sandboxes that a task has: its agent's and its verifier's. One spare of each is kept."""
VERBS = ("freeze", "restart", "pack", "alone", "put", "run", "read", "stop")


@dataclass
class Judged:
    """One verdict: seconds by what they are of."""

    start: float = 0.0
    verdict: float = 0.0
    removed: float = 0.0
    steps: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Of the agent's sandbox and of the fresh one. Some run at the same time."""


async def verdicts(sandboxes: DockerSandboxes, image: str, times: int) -> dict[str, Any]:
    """Median milliseconds of verdicts, of their steps and of a start."""
    rounds: list[dict[str, Judged]] = []
    warm = WarmPool(await DockerSandboxes.open(Options(run="benchmark")), 1)
    try:
        await _judged(warm, _task(image, "fresh"), stocked=False)  # asks for spares of either kind
        for _ in range(times):
            await _stocked(warm)  # so that no start of a spare one disturbs what is measured
            judged = {where: await _judged(sandboxes, _task(image, where)) for where in ("fresh", "shared")}
            rounds.append(judged | {"warm": await _judged(warm, _task(image, "fresh"))})
    finally:
        await warm.close()
    return _figures(rounds)


def _figures(rounds: list[dict[str, Judged]]) -> dict[str, Any]:
    def of(figure: Callable[[dict[str, Judged]], float]) -> float:
        return median(map(figure, rounds)) * 1e3

    starts = [judged[where].start for judged in rounds for where in ("fresh", "shared")]
    figures: dict[str, Any] = {
        "fresh_verifier_ms": of(lambda judged: judged["fresh"].verdict),
        "fresh_verifier_warm_ms": of(lambda judged: judged["warm"].verdict),
        "shared_verifier_ms": of(lambda judged: judged["shared"].verdict),
        "fresh_removed_ms": of(lambda judged: judged["fresh"].removed),
        "shared_removed_ms": of(lambda judged: judged["shared"].removed),
        "start_ms": median(starts) * 1e3,
        "fresh_over_shared_ms": of(lambda judged: judged["fresh"].verdict - judged["shared"].verdict),
    }
    for name, where in (("fresh_extra_starts", "fresh"), ("fresh_warm_extra_starts", "warm")):
        more = [judged[where].verdict - _not_restarted(judged["shared"]) for judged in rounds]
        figures[name] = median(more) / median(starts)
    for where in ("fresh", "shared"):
        steps: dict[str, list[float]] = defaultdict(list)
        for judged in rounds:
            for step, seconds in judged[where].steps.items():
                steps[step].append(seconds)
        figures[f"{where}_steps_ms"] = {step: round(median(taken) * 1e3, 1) for step, taken in steps.items()}
    return figures


def _not_restarted(shared: Judged) -> float:
    return shared.verdict - shared.steps["agent's restart"]


def _task(image: str, where: str) -> Task:
    verifier = {"command": "test -e hello.txt", "where": where}
    return msgspec.convert(TASK | {"image": {"name": image}, "verifier": verifier}, Task)


async def _judged(sandboxes: DockerSandboxes | WarmPool, task: Task, stocked: bool = True) -> Judged:
    judged = Judged()
    began = time.perf_counter()
    sandbox = await sandboxes.start(spec_of(task))
    await sandbox.run("true", Limits(), {})
    judged.start = time.perf_counter() - began
    try:
        await set_up(sandbox, task)
        snapshot = await take_snapshot(sandbox, task, sandboxes)
        await sandbox.run("echo hello > hello.txt", Limits(), {})
        if isinstance(sandboxes, WarmPool) and stocked:
            await _stocked(sandboxes)
        _watch(sandbox, "agent's", judged.steps)
        watched: Any = _Watched(sandboxes, judged.steps)
        began = time.perf_counter()
        async with verifier_sandbox(watched, sandbox, task, snapshot) as (room, _):
            assert (await verify(room, task)).reward == 1.0
            judged.verdict = time.perf_counter() - began
    finally:
        await sandbox.stop()
    judged.removed = time.perf_counter() - began
    return judged


class _Watched:
    """Sandboxes whose starts, and what is done with them, are timed."""

    def __init__(self, inner: DockerSandboxes | WarmPool, steps: dict[str, float]):
        self._inner, self._steps = inner, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def start(self, spec: Spec) -> DockerSandbox:
        sandbox = await _timed(self._inner.start, "fresh start", self._steps)(spec)
        _watch(sandbox, "fresh", self._steps)
        return sandbox


def _watch(sandbox: DockerSandbox, whose: str, steps: dict[str, float]) -> None:
    for verb in VERBS:
        setattr(sandbox, verb, _timed(getattr(sandbox, verb), f"{whose} {verb}", steps))


def _timed(verb: Callable[..., Awaitable[Any]], name: str, steps: dict[str, float]) -> Callable[..., Awaitable[Any]]:
    async def timed(*arguments: Any, **others: Any) -> Any:
        began = time.perf_counter()
        try:
            return await verb(*arguments, **others)
        finally:
            user = f" as {arguments[3]}" if name.endswith(" run") and len(arguments) > 3 else ""
            steps[name + user] += time.perf_counter() - began

    return timed


async def _stocked(warm: WarmPool) -> None:
    """Wait until there is a spare container of each kind."""
    async with asyncio.timeout(300):
        while warm.spares < KINDS:
            await asyncio.sleep(0.01)
