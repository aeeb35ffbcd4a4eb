"""The run: which rollout starts when, and the clean end, whatever brings it about.

The order of tasks follows from the seed alone, so a resumed run goes on where the pool says it stopped: first the
rollouts without an outcome, with new attempts, then the groups that were never opened.
"""

import asyncio
from dataclasses import dataclass
from itertools import islice

import msgspec

from harness.progress import Board
from harness.rollout import Bench, run_rollout
from harness.tasks.mix import Mix
from proxy.pool.groups import OpenRollout, known_tasks, open_group, open_rollouts
from proxy.pool.runs import admission

POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run is to do."""

    mix: Mix
    group_size: int
    concurrency: int
    seed: int = 0
    epochs: int | None = 1
    """How often each task is opened; None: again and again."""
    until_step: int | None = None
    """Feed a training run under its admission rule until it has published this step."""

    def turns(self) -> int | None:
        """How many groups that makes; None when it is open."""
        return None if self.epochs is None else self.epochs * len(self.mix.tasks)

    def expected(self) -> int | None:
        """How many rollouts that makes; None when it is open."""
        turns = self.turns()
        return None if turns is None else turns * self.group_size


class Loop:
    """Keeps up to `concurrency` rollouts at work."""

    def __init__(self, bench: Bench, run_id: int, plan: Plan, board: Board):
        self._bench = bench
        self._run_id = run_id
        self._plan = plan
        self._board = board
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._at_work: set[asyncio.Task[None]] = set()

    async def go(self) -> None:
        """Run until the plan is done. Whatever still works then, or when anything raises, is ended cleanly."""
        self._at_work.add(asyncio.create_task(self._feed()))
        try:
            while self._at_work and not self._reached():
                done, _ = await asyncio.wait(self._at_work, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                self._at_work -= done
                for task in done:
                    task.result()
                self._board.refresh()
        finally:
            for task in self._at_work:
                task.cancel()
            await asyncio.gather(*self._at_work, return_exceptions=True)

    def _reached(self) -> bool:
        if self._plan.until_step is None:
            return False
        self._board.step = admission(self._bench.pool, self._run_id).step
        return self._board.step is not None and self._board.step >= self._plan.until_step

    async def _feed(self) -> None:
        pool, plan = self._bench.pool, self._plan
        opened = sum(known_tasks(pool, self._run_id).values())
        for rollout in open_rollouts(pool, self._run_id):
            await self._admitted(opening=False)
            await self._start(rollout)
        for task in islice(plan.mix.order(plan.seed), opened, plan.turns()):
            await self._admitted(opening=True)
            for rollout in open_group(pool, self._run_id, msgspec.to_builtins(task), plan.group_size):
                await self._start(rollout)

    async def _admitted(self, opening: bool) -> None:
        """Wait for the trainer: for its first weights, and before a new group, until its queue has room."""
        async with self._slots:
            pass  # a group opened long before its first rollout can start would only grow stale
        if self._plan.until_step is None:
            return
        while True:
            now = admission(self._bench.pool, self._run_id)
            limit = now.queue_limit
            if now.step is not None and limit is not None and (not opening or now.open_groups < limit):
                self._board.note = ""
                return
            waiting = "no weights yet" if now.step is None else f"{now.open_groups} groups wait to be trained"
            self._board.note = f"waiting for the trainer ({waiting})"
            await asyncio.sleep(POLL_SECONDS)

    async def _start(self, rollout: OpenRollout) -> None:
        await self._slots.acquire()
        self._board.running += 1
        self._at_work.add(asyncio.create_task(self._roll(rollout)))

    async def _roll(self, rollout: OpenRollout) -> None:
        try:
            self._board.add(await run_rollout(self._bench, rollout))
        finally:
            self._board.running -= 1
            self._slots.release()
