"""The run: which rollout starts when, and the clean end, whatever brings it about.

The order of tasks and agents follows from the seed alone, so a resumed run goes on where the pool says it stopped:
first the rollouts without an outcome, with new attempts, then the groups that replace filtered ones, then those that
were never opened.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from harness.agents.mix import Scaffold, scaffold_of
from harness.agents.one_call import AGENT, OneCall
from harness.monitor.progress import Board
from harness.rollout import Cancellation, RunContext, run_rollout
from harness.tasks.mix import TaskMix
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import HasOutcome
from proxy.pool.rollouts.failures import CAP, FAILURES, alarming, treatment
from proxy.pool.rollouts.groups import GroupOptions, GroupProgress, OpenRollout, Outcome, open_group, open_rollouts
from proxy.pool.rollouts.queue import PlannedGroup, lost_groups, opened_in_order, replacements
from proxy.pool.rollouts.runs import admission, record_event

POLL_SECONDS = 0.2
ANSWERING = Scaffold(name=AGENT, agent=OneCall())
"""Whose turn it is when a task asks for an answer only."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run is to do."""

    mix: TaskMix
    scaffolds: Sequence[Scaffold]
    group_size: int
    concurrency: int
    seed: int = 0
    epochs: int | None = 1
    """How often each task is opened; None: again and again."""
    until_step: int | None = None
    """Feed a training run under its admission rule until it has published this step."""
    redundant: int = 0
    """Members that each group has beyond its size; the last to finish are called off."""

    def turns(self) -> int | None:
        """How many groups that makes; None when it is open."""
        return None if self.epochs is None else self.epochs * len(self.mix.tasks)

    def expected(self) -> int | None:
        """How many rollouts that makes; None when it is open."""
        turns = self.turns()
        return None if turns is None else turns * (self.group_size + self.redundant)

    def groups(self, opened: int) -> Iterator[PlannedGroup]:
        """The groups to open, from the one of this index on."""
        tasks = islice(self.mix.order(self.seed), opened, self.turns())
        for index, task in enumerate(tasks, opened):
            scaffold = scaffold_of(index, self.seed, self.scaffolds) if task.domain == "agent" else ANSWERING
            options = GroupOptions(redundant=self.redundant, agent=scaffold.name, held_out=scaffold.held_out)
            yield PlannedGroup(msgspec.to_builtins(task), self.group_size, options)


@dataclass
class _RunningRollout:
    task: "asyncio.Task[None]"
    cancellation: Cancellation


class RunLoop:
    """Keeps up to `concurrency` rollouts at work."""

    def __init__(self, context: RunContext, run_id: int, plan: RunPlan, board: Board):
        self._context = context
        self._pool = context.pool
        self._run_id = run_id
        self._plan = plan
        self._board = board
        self._agents = {scaffold.name: scaffold.agent for scaffold in (*plan.scaffolds, ANSWERING)}
        self._slots = asyncio.Semaphore(plan.concurrency)
        self._running: dict[int, _RunningRollout] = {}
        self._called_off: dict[int, str] = {}
        self._owing = True
        """Whether the pool may know of groups to replace."""
        self._ended = asyncio.Event()
        """A rollout has ended since this was cleared."""
        self._failed: asyncio.Future[None]

    async def go(self) -> None:
        """Run until the plan is done. Whatever still works then, or when anything raises, is ended cleanly."""
        self._failed = asyncio.get_running_loop().create_future()
        feeding = asyncio.create_task(self._feed())
        try:
            while not await self._reached():
                await asyncio.wait({feeding, self._failed}, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                self._board.refresh()
                if self._failed.done():
                    self._failed.result()
                if feeding.done():
                    return feeding.result()
        finally:
            working = [feeding, *(rollout.task for rollout in self._running.values())]
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            self._failed.cancel()

    async def _reached(self) -> bool:
        if self._plan.until_step is None:
            return False
        self._board.step = (await self._pool(admission, self._run_id)).step
        return self._board.step is not None and self._board.step >= self._plan.until_step

    async def _feed(self) -> None:
        """Start whatever is to be started, and return when it has all ended."""
        for rollout in await self._pool(open_rollouts, self._run_id):
            await self._admitted(opening=False)
            await self._start(rollout)
        planned = self._plan.groups(await self._pool(opened_in_order, self._run_id))
        owed: list[PlannedGroup] = []
        while True:
            self._ended.clear()
            if self._owing:
                self._owing = False
                owed = await self._pool(replacements, self._run_id, self._plan.redundant)
            group = owed.pop(0) if owed else next(planned, None)
            if group is not None:
                await self._admitted(opening=True)
                members = await self._pool(open_group, self._run_id, group.task, group.size, group.options)
                for rollout in members:
                    await self._start(rollout)
            elif self._running:
                await self._ended.wait()
            else:
                return

    async def _admitted(self, opening: bool) -> None:
        """Wait for the trainer: for its first weights, and before a new group, until its queue has room."""
        async with self._slots:
            pass  # a group opened long before its first rollout can start would only grow stale
        if self._plan.until_step is None:
            return
        while True:
            now = await self._pool(admission, self._run_id)
            if now.step is not None and now.queue_limit is not None and (not opening or now.room):
                self._board.note = ""
                return
            waiting = "no weights yet" if now.step is None else f"{now.open_groups} groups wait to be trained"
            self._board.note = f"waiting for the trainer ({waiting})"
            await asyncio.sleep(POLL_SECONDS)

    async def _start(self, rollout: OpenRollout) -> None:
        await self._slots.acquire()
        if rollout.rollout_id in self._called_off:  # while it waited
            self._slots.release()
            return
        self._board.running += 1
        cancellation = Cancellation()
        task = asyncio.create_task(self._roll(rollout, cancellation))
        self._running[rollout.rollout_id] = _RunningRollout(task, cancellation)

    async def _roll(self, rollout: OpenRollout, cancellation: Cancellation) -> None:
        # rows of older runs name no agent
        agent = (*self._plan.scaffolds, ANSWERING)[0].agent if rollout.agent is None else self._agents[rollout.agent]
        try:
            outcome, finished = await run_rollout(self._context, rollout, agent, cancellation)
            if rollout.rollout_id not in self._called_off:
                self._board.add(outcome)
            self._call_off(finished)
            if finished.failure is not None:
                await self._lost(rollout.task, finished)
        except HasOutcome:  # another member's outcome called it off just now
            pass
        except asyncio.CancelledError:
            if cancellation.reason is None:
                raise
        except Exception as error:  # what no rollout could survive ends the run; `go` raises it again
            if not self._failed.done():
                self._failed.set_exception(error)
        finally:
            self._board.running -= 1
            del self._running[rollout.rollout_id]
            self._slots.release()
            self._ended.set()

    def _call_off(self, finished: GroupProgress) -> None:
        """End the rollouts that another one's outcome has made superfluous."""
        kind = "redundant" if finished.failure is None else "filtered"
        for rollout_id in finished.cancelled:
            self._called_off[rollout_id] = kind
            self._board.add(Outcome(attempt_id=None, reward=None, failure=kind))
            if rollout_id in self._running:
                self._running[rollout_id].cancellation.reason = kind
                self._running[rollout_id].task.cancel()

    async def _lost(self, task: dict[str, Any], finished: GroupProgress) -> None:
        """A group is lost: replace it where it was filtered; UserError when too many are."""
        if finished.failure in FAILURES and treatment(finished.failure) == "filter":
            self._owing = True
        domain = task.get("domain", "agent")
        lost = await self._pool(lost_groups, self._run_id, domain)
        found = alarming(lost)
        if not found:
            return
        said = f"{sum(lost)} of the last {len(lost)} groups of domain {domain!r} were lost to failures"
        await self._pool(record_event, self._run_id, found, said)
        self._board.alarm(f"{said}, the newest to {finished.failure}")
        if found == "stop":
            raise UserError(
                f"{said}, the newest to {finished.failure}, and more than {CAP.stop:.0%} would make a run of noise; "
                "find the cause in results.jsonl and repeat the same command to go on"
            )
