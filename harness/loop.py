"""The run: decides which rollout starts when, and ends all of them cleanly, whatever the reason.

The order of tasks and agents follows from the seed alone (where settled tasks are skipped, also from the rewards in the
pool), so a resumed run goes on where the pool says it stopped.
First come the rollouts without an outcome, with new attempts, then groups that replace filtered ones, then new groups.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, repeat
from typing import Any

import msgspec

from harness.agents.mix import Scaffold, scaffold_of
from harness.agents.one_call import AGENT, OneCall
from harness.anchors import Anchors
from harness.monitor.engine_presence import EnginePresence
from harness.monitor.progress import Board
from harness.monitor.trainer_watch import TrainerWatch
from harness.rollout.context import Cancellation, RunContext
from harness.rollout.run import run_rollout
from harness.tasks import Task
from harness.tasks.mix import TaskMix
from proxy.pool.errors import UserError
from proxy.pool.inspect.rule_states import rule_states
from proxy.pool.rollouts.attempts import HasOutcome
from proxy.pool.rollouts.failures import CAP, FAILURES, SPOILED_FEWEST, SPOILED_WINDOW, alarming, treatment
from proxy.pool.rollouts.groups import (
    GroupOptions,
    GroupProgress,
    OpenRollout,
    Outcome,
    called_off,
    dropped_tasks,
    open_group,
    open_rollouts,
)
from proxy.pool.rollouts.queue import (
    PlannedGroup,
    is_settled,
    lost_groups,
    opened_in_order,
    places,
    replacements,
    spoiled_of,
)
from proxy.pool.rollouts.runs import record_event
from sandboxes.base import SandboxError

ANSWERING = Scaffold(name=AGENT, agent=OneCall())
"""The agent of tasks that ask for an answer only."""
BOARD_SECONDS = 0.5
"""Longest time between two updates of the board."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The tasks and agents of a run, and how many rollouts of them to run."""

    mix: TaskMix
    scaffolds: Sequence[Scaffold]
    group_size: int
    concurrency: int
    seed: int = 0
    epochs: int | None = 1
    """How often each task is run. None: until the run is stopped."""
    until_step: int | None = None
    """Feed a training run under its admission rule until it has published this step."""
    redundant: int = 0
    """Extra members of each group; when `group_size` have finished, the others are cancelled."""
    tokens: Sequence[tuple[int, int]] = ()
    """(step, tokens) by step: how many tokens the attempts of groups may sample that are opened from that step on."""
    anchors: Anchors | None = None
    """How groups begin with recorded attempts; None: they do not."""
    every_agent: bool = False
    """Give every task to every agent once, in the order of the tasks. Else the seed chooses an agent for each task."""

    def turns(self) -> int | None:
        """Number of groups; None when the run has no fixed end."""
        if self.every_agent:
            return len(self._pairs())
        return None if self.epochs is None else self.epochs * len(self.mix.tasks)

    def expected(self) -> int | None:
        """Number of rollouts; None when the run has no fixed end."""
        turns = self.turns()
        return None if turns is None else turns * (self.group_size + self.redundant)

    def groups(
        self, opened: int, reached: Sequence[int] = (), settled: Callable[[Task], bool] = lambda _: False
    ) -> Iterator[PlannedGroup]:
        """The groups to open, when `opened` have been opened before.

        Where settled tasks are skipped, `reached` are the places of the tasks of those, and `settled` is asked about a
        task when the turn comes to it.
        """
        if self.every_agent:
            yield from (self._planned(task, scaffold) for task, scaffold in self._pairs()[opened:])
            return
        order: Iterator[tuple[Task, int | None]]
        if self.mix.revisit is None:
            order = zip(islice(self.mix.order(self.seed), opened, None), repeat(None))
        else:
            order = self.mix.skipping_settled(self.seed, reached, settled)
        turns = self.turns()
        for index, (task, place) in zip(count(opened) if turns is None else range(opened, turns), order, strict=False):
            scaffold = scaffold_of(index, self.seed, self.scaffolds) if task.domain == "agent" else ANSWERING
            yield self._planned(task, scaffold, place)

    def _planned(self, task: Task, scaffold: Scaffold, place: int | None = None) -> PlannedGroup:
        options = GroupOptions(redundant=self.redundant, agent=scaffold.name, held_out=scaffold.held_out, place=place)
        return PlannedGroup(msgspec.to_builtins(task), self.group_size, options)

    def _pairs(self) -> list[tuple[Task, Scaffold]]:
        return [
            (task, scaffold)
            for task in self.mix.tasks
            for scaffold in (self.scaffolds if task.domain == "agent" else (ANSWERING,))
        ]

    def max_tokens(self, step: int) -> int | None:
        """The tokens that the attempts of a group may sample that is opened after this step. None: no limit."""
        return next((tokens for begin, tokens in reversed(self.tokens) if begin <= step), None)


@dataclass
class _RunningRollout:
    task: "asyncio.Task[None]"
    cancellation: Cancellation


class RunLoop:
    """Keeps up to `concurrency` rollouts running."""

    def __init__(
        self,
        context: RunContext,
        run_id: int,
        plan: RunPlan,
        board: Board,
        slots: asyncio.Semaphore | None = None,
    ):
        """`slots`: the places for rollouts that it shares with other runs. None: it has `plan.concurrency`."""
        self._context = context
        self._pool = context.pool
        self._run_id = run_id
        self._plan = plan
        self._board = board
        self._trainer = TrainerWatch(context.pool, run_id)
        self._agents = {scaffold.name: scaffold.agent for scaffold in (*plan.scaffolds, ANSWERING)}
        self._slots = slots or asyncio.Semaphore(plan.concurrency)
        self._running: dict[int, _RunningRollout] = {}
        self._called_off: dict[int, str] = {}
        self._spoiled_said: dict[str, int] = {}
        """Id of a task -> the number of its spoiled rollouts at the last alarm."""
        self._dropped_tasks = 0
        """Tasks that the trainer's monitor has dropped, when rollouts were cancelled for it last."""
        self._paused = ""
        self._owing = True
        """Whether the pool may hold filtered groups that need a replacement."""
        self._ended = asyncio.Event()
        """Set when a rollout ends."""
        self._failed: asyncio.Future[None]

    async def go(self) -> None:
        """Run until the plan is done, or something raises. Rollouts that still run then are cancelled and awaited."""
        self._failed = asyncio.get_running_loop().create_future()
        feeding, engine = asyncio.create_task(self._feed()), self._context.engine
        engine.watch()
        try:
            while not await self._reached():
                pause = self._trainer.pause(BOARD_SECONDS)
                await asyncio.wait({feeding, self._failed}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                self._board.outage = self._context.sandboxes.away or engine.away
                self._board.making = self._context.sandboxes.making
                self._board.refresh()
                _check_patience(engine)
                if self._failed.done():
                    self._failed.result()
                if feeding.done():
                    return feeding.result()
        finally:
            working = [feeding, *(rollout.task for rollout in self._running.values())]
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            await engine.close()
            self._board.making = ""
            self._failed.cancel()  # also keeps asyncio from printing its traceback where another error ends the run

    async def _reached(self) -> bool:
        if self._plan.until_step is None:
            return False
        now = await self._trainer.latest()
        if now.dropped_tasks != self._dropped_tasks:
            self._dropped_tasks = now.dropped_tasks
            self._cancel(await self._pool(called_off, list(self._running)), "called_off")
        if (now.step, now.paused) != (self._board.step, self._paused):
            self._board.step, self._paused = now.step, now.paused
            self._board.rules.rules = await self._pool(rule_states, self._run_id)
            self._board.rules.paused = bool(now.paused)
        return self._board.step is not None and self._board.step >= self._plan.until_step

    async def _feed(self) -> None:
        """Start all rollouts, and return when they have ended."""
        for rollout in await self._pool(open_rollouts, self._run_id):
            await self._admitted(opening=False)
            await self._start(rollout)
        opened, reached = await self._pool(opened_in_order, self._run_id), await self._pool(places, self._run_id)
        planned = self._plan.groups(opened, reached, self._settled)
        due: list[PlannedGroup] = []
        while True:
            await self._admitted(opening=True)
            self._ended.clear()
            if self._owing:
                self._owing = False
                due = await self._pool(replacements, self._run_id, self._plan.redundant)
            group = due.pop(0) if due else await self._pool(lambda _: next(planned, None))
            if group is not None:
                options = await self._with_start(group)
                opened_now = await self._pool(open_group, self._run_id, group.task, group.size, options)
                for rollout in opened_now:
                    await self._start(rollout)
                if not opened_now:
                    await self._demand_tasks()
            elif self._running:
                await self._ended.wait()
            else:
                return

    def _settled(self, task: Task) -> bool:
        return is_settled(self._pool.blocking, self._run_id, task.id)

    async def _demand_tasks(self) -> None:
        """UserError when the trainer's monitor has dropped every task."""
        dropped = await self._pool(dropped_tasks, self._run_id)
        if dropped >= {task.id for task in self._plan.mix.tasks}:
            raise UserError(
                f"the trainer's monitor has dropped every task of the run ({len(dropped)}), so there is nothing to "
                "sample; `harness watch` shows its rules. Start a run with other tasks or rules"
            )

    async def _with_start(self, group: PlannedGroup) -> GroupOptions:
        """The options of a group that is opened now: what its rollouts begin with, and their budget."""
        options, anchors = group.options, self._plan.anchors
        if anchors is not None:
            options = await self._pool(anchors.begin, self._run_id, group)
        return await self._with_budget(options)

    async def _with_budget(self, options: GroupOptions) -> GroupOptions:
        """All rollouts of a group have the budget of the train step that is the newest one when it is opened."""
        if not self._plan.tokens:
            return options
        step = (await self._trainer.look()).step or 0
        return replace(options, max_tokens=self._plan.max_tokens(step))

    async def _admitted(self, opening: bool) -> None:
        """Wait until the trainer has published weights and, before a new group, until its queue has room."""
        async with self._slots:
            pass  # wait for a free slot: a group that is opened before it can start only grows stale
        if self._plan.until_step is None:
            return
        now = await self._trainer.look()  # the last one may be older than the group that was opened last
        while True:
            if now.step is not None and now.queue_limit is not None and (not opening or now.room):
                self._board.note = ""
                return
            if now.paused:
                self._board.note = f"paused by the monitor's rule {now.paused}; `trainer continue` ends it"
            elif now.step is None or now.queue_limit is None:
                self._board.note = "waiting for the trainer's first weights"
            else:  # what it waits for may be its own slowest rollout
                self._board.note = f"open groups: {now.open_groups} of {now.queue_limit}, the trainer's limit"
            await asyncio.sleep(self._trainer.pause())
            now = await self._trainer.latest()

    async def _start(self, rollout: OpenRollout) -> None:
        await self._slots.acquire()
        if rollout.rollout_id in self._called_off:  # cancelled while it waited for a slot
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
            if outcome.failure == "spoiled":
                await self._spoiled(rollout.task["id"])
            if finished.failure is not None:
                await self._lost(rollout.task, finished)
        except HasOutcome:  # another member's outcome cancelled it just now
            pass
        except asyncio.CancelledError:
            if cancellation.reason is None:
                raise
        except Exception as error:  # it ends the run: `go` raises it again
            if not self._failed.done():
                self._failed.set_exception(error)
        finally:
            self._board.running -= 1
            del self._running[rollout.rollout_id]
            self._slots.release()
            self._ended.set()

    def _call_off(self, finished: GroupProgress) -> None:
        """Cancel the rollouts that another one's outcome has made superfluous."""
        self._cancel(finished.cancelled, "redundant" if finished.failure is None else "filtered")

    def _cancel(self, rollout_ids: Iterable[int], kind: str) -> None:
        """Cancel rollouts that have their outcome in the pool."""
        for rollout_id in rollout_ids:
            if rollout_id in self._called_off:  # still cleaning up, which another cancellation would cut short
                continue
            self._called_off[rollout_id] = kind
            self._board.add(Outcome(attempt_id=None, reward=None, failure=kind))
            if rollout_id in self._running:
                self._running[rollout_id].cancellation.reason = kind
                self._running[rollout_id].task.cancel()

    async def _spoiled(self, task: str) -> None:
        """Warn when one task's verdicts are spoiled again and again."""
        spoiled = await self._pool(spoiled_of, self._run_id, task)
        if spoiled < max(SPOILED_FEWEST, 2 * self._spoiled_said.get(task, 0)):
            return
        self._spoiled_said[task] = spoiled
        message = (
            f"{spoiled} of the last {SPOILED_WINDOW} rollouts of task {task!r} left work that its verifier "
            "cannot judge; the policy may avoid verdicts that it would lose"
        )
        await self._pool(record_event, self._run_id, "alarm", message)
        self._board.alarm(message)

    async def _lost(self, task: dict[str, Any], finished: GroupProgress) -> None:
        """Handle a lost group: replace it if it was filtered. UserError when too many groups were lost."""
        if finished.failure in FAILURES and treatment(finished.failure) == "filter":
            self._owing = True
        domain = task.get("domain", "agent")
        lost = await self._pool(lost_groups, self._run_id, domain)
        level = alarming(lost)
        if not level:
            return
        message = f"{sum(lost)} of the last {len(lost)} groups of domain {domain!r} were lost to failures"
        await self._pool(record_event, self._run_id, level, message)
        self._board.alarm(f"{message}, the newest to {finished.failure}")
        if level == "stop":
            raise UserError(
                f"stopped: {message}, the newest to {finished.failure}; if more than {CAP.stop:.0%} are lost, training "
                "on the rest would be biased. Find the cause in results.jsonl, then repeat the same command to go on"
            )


def _check_patience(engine: EnginePresence) -> None:
    """End the run when no engine has been up for too long. Its attempts are interrupted, and start again on resume."""
    try:
        engine.check()
    except SandboxError as error:
        raise UserError(f"{error}, then repeat the same command to go on") from error
