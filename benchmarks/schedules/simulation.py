"""One simulated training run. The clock is simulated, the scheduler is not.

Groups are opened where the pool's admission has room, get their outcome, are leased, published and marked as pushed by
the code that runs use, in a pool on SQLite. Times in the pool's rows are those of the real clock; no decision reads
them.
"""

import heapq
import math
import tempfile
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from statistics import NormalDist
from zlib import crc32

from sqlalchemy import func, select

from proxy.pool.completions.records import NewCompletion, VersionSpan, int_bytes
from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row, open_pool
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import admission, open_run, set_queue_limit
from proxy.pool.schema import completions, groups
from proxy.pool.training.steps import Published, Version, mark_pushed, publish
from proxy.pool.training.windowed_fifo import lease
from trainer.config.batch import BatchConfig

SLOTS = 64
"""Rollouts that run at once. A group has one rollout, so that the queue of 4 x 16 groups fills them."""
MEDIAN_SECONDS, LONGEST = 60.0, 60.0
"""Of a rollout; the longest takes so many medians, as a limit on its time would have it."""
RELATED = 0.5
"""Correlation of a task's difficulty with the logarithm of its rollout's time."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Times of rollouts (lognormal) and of train steps."""

    sigma: float
    step_seconds: float


@dataclass
class Trace:
    """What one simulated run did."""

    seconds: float = 0.0
    lag: int = 0
    """The most published steps that a trained rollout lagged behind."""
    submitted: list[tuple[float, float]] = field(default_factory=list)
    """Seconds and difficulty of every group, in the order of opening."""
    steps: list[list[int]] = field(default_factory=list)
    """The groups that each step trained, as indices into `submitted`."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Groups that no step takes, by reason."""


class Simulation:
    """One run: a heap of events, and the pool that decides what may happen."""

    def __init__(self, pool: Pool, workload: Workload, batch: BatchConfig, seed: int):
        self.pool, self.workload, self.batch = pool, workload, batch
        self.random = Random(seed)
        self.run_id = open_run(pool, "simulated", "train", {}).id
        set_queue_limit(pool, self.run_id, batch.open_groups)
        self.trace = Trace()
        self.version = self._publish(0, None)
        self.free_slots, self.training = SLOTS, False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()  # keep the order of events of one moment

    def go(self, steps: int) -> Trace:
        """Simulate until this many steps are trained and pushed."""
        while self.version.step < steps:
            if not self.training:
                self._train()  # first, because what it drops makes room
            while self.free_slots and admission(self.pool, self.run_id).room:
                self._open()
            self.trace.seconds, _, happen = heapq.heappop(self._events)
            happen()
        with self.pool.read() as connection:
            counts = (
                select(groups.c.reason, func.count()).where(groups.c.state == "TOMBSTONE").group_by(groups.c.reason)
            )
            self.trace.dropped = {reason: count for reason, count in connection.execute(counts)}
        return self.trace

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.trace.seconds + seconds, next(self._numbers), happen))

    def _open(self) -> None:
        """Open a group and begin its rollout, with the weights that engines have now."""
        length, other = self.random.gauss(), self.random.gauss()
        seconds = MEDIAN_SECONDS * min(LONGEST, math.exp(self.workload.sigma * length))
        difficulty = RELATED * length + math.sqrt(1 - RELATED**2) * other
        task = {"id": f"task {len(self.trace.submitted)}", "instruction": "", "domain": "simulated"}
        [rollout] = open_group(self.pool, self.run_id, task, 1)
        self.trace.submitted.append((seconds, difficulty))
        self.free_slots -= 1
        reward = float(self.random.random() > NormalDist().cdf(difficulty))
        version = self.version.name
        self._after(seconds, lambda: self._finish(rollout.rollout_id, version, reward))

    def _finish(self, rollout_id: int, version: str, reward: float) -> None:
        attempt, _ = open_attempt(self.pool, rollout_id, "simulated")
        with self.pool.write() as connection:
            insert_row(connection, completions, to_row(completion(attempt.id, version)) | {"ordinal": 0})
        close_attempt(self.pool, attempt.id, Ending())
        finish_rollout(self.pool, rollout_id, Outcome(attempt_id=attempt.id, reward=reward))
        self.free_slots += 1

    def _train(self) -> None:
        """Begin a step if its batch is there."""
        step = self.version.step + 1
        taken = lease(self.pool, self.run_id, step, self.batch.rule())
        if taken is not None:
            self.training = True
            self.trace.lag = max(self.trace.lag, *(group.staleness for group in taken.groups))
            self.trace.steps.append([group.queue_index for group in taken.groups])
            self._after(self.workload.step_seconds, lambda: self._push(step))

    def _push(self, step: int) -> None:
        self.version, self.training = self._publish(step, self.version.id), False

    def _publish(self, step: int, parent: int | None) -> Version:
        done = Published(step=step, parent=parent, checkpoint=f"{step}", hf_dir=f"{step}", metrics={})
        version = publish(self.pool, self.run_id, done)
        mark_pushed(self.pool, version)
        return version


def completion(attempt_id: int, version: str) -> NewCompletion:
    """One short answer, sampled by this version."""
    now = time.time()
    return NewCompletion(
        attempt_id=attempt_id,
        prompt_tail=array("i", [1]),
        sampled=array("i", [2]),
        logprobs=array("f", [-0.5]),
        versions=(VersionSpan(version, 0, 1),),
        finish_reason="stop",
        reply={"role": "assistant", "content": ""},
        path_crc=crc32(int_bytes([1, 2])),
        started_at=now,
        finished_at=now,
    )


def simulate(workload: Workload, batch: BatchConfig, steps: int, seed: int) -> Trace:
    """One run in a pool of its own, which is deleted with it."""
    memory = Path("/dev/shm")  # no disk, which other processes keep busy
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        pool = open_pool(f"{directory}/pool.db")
        try:
            return Simulation(pool, workload, batch, seed).go(steps)
        finally:
            pool.close()
