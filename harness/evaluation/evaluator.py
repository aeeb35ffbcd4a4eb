"""Evaluates the policy of a training run while it trains, in runs of their own (proxy/pool/training/evaluations.py).

The clock is the trainer's: when a multiple of `every` steps was reached since the last evaluation, the newest pushed
version is evaluated. One evaluation goes on at a time, so steps that pass meanwhile are skipped. What is due follows
from the pool alone, so a harness that starts again goes on with an unfinished evaluation and repeats none. Rollouts of
both runs take turns for the same places. Not here: what came out (proxy/pool/inspect/evaluated.py).
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rich.console import Console

from harness.evaluation.plan import EvaluationPlan, engine_to_hold, is_due
from harness.loop import RunLoop
from harness.monitor.progress import Board
from harness.monitor.trainer_watch import TrainerWatch
from harness.rollout.context import RunContext
from harness.setup.stack import RunningProxy, ask_health, reason
from proxy.pool.inspect.evaluated import point_line, points
from proxy.pool.processes.owners import HEARTBEAT_SECONDS, owned
from proxy.pool.rollouts.attempts import close_interrupted, still_open
from proxy.pool.rollouts.groups import RolloutRow, run_summary
from proxy.pool.rollouts.runs import Run, find_run
from proxy.pool.training.evaluations import Evaluation, evaluations, is_finished, open_evaluation
from proxy.pool.training.steps import Version, latest


class Evaluator:
    """Evaluates one training run until the version of its last step is evaluated."""

    def __init__(
        self,
        context: RunContext,
        run: Run,
        plan: EvaluationPlan,
        *,
        proxy: RunningProxy,
        board: Board,
        slots: asyncio.Semaphore,
    ):
        # Without variations: points are compared, so all rollouts work in the same environment.
        self._context = replace(context, augment=None, prompt_kinds=())
        self._pool, self._run, self._plan = context.pool, run, plan
        self._proxy, self._board, self._slots = proxy, board, slots
        self._trainer = TrainerWatch(context.pool, run.id)
        self._said: set[str] = set()

    async def go(self) -> None:
        known = await self._pool(evaluations, self._run.id)
        if known:  # it may be unfinished
            await self._work(known[-1])
        while (version := await self._next()) is not None:
            await self._work(await self._opened(version))

    async def _next(self) -> Version | None:
        """Wait for a pushed version that is due; None: the last one was evaluated."""
        while True:
            await self._trainer.latest()
            version = await self._pool(latest, self._run.id)
            known = await self._pool(evaluations, self._run.id)  # again, as a rollback takes some back
            last = known[-1].of.step if known else None
            if last is not None and last >= self._plan.until_step:
                return None
            if version is not None and version.pushed_at is not None and is_due(version.step, last, self._plan):
                return version
            await asyncio.sleep(self._trainer.pause())

    async def _opened(self, version: Version) -> Evaluation:
        engine = await self._engine_at(version.name) if self._plan.hold else ""
        rollouts = self._plan.run_plan.expected()
        assert rollouts is not None
        return await self._pool(
            open_evaluation, self._run, version, self._plan.config(), engine=engine, rollouts=rollouts
        )

    async def _engine_at(self, version: str) -> str:
        """The engine to hold; empty where there is none, which is said."""
        try:
            health = await asyncio.to_thread(ask_health, self._proxy.url, self._proxy.admin_key)
            engine, why = engine_to_hold([(replica.url, replica.version) for replica in health.replicas], version)
        except OSError as error:
            engine, why = "", f"the proxy does not answer ({reason(error)})"
        if why and why not in self._said:
            self._said.add(why)
            self._board.say(f"eval_hold holds no engine: {why}; newer weights may sample a part of the evaluation")
        return engine

    async def _work(self, evaluation: Evaluation) -> None:
        """Do what is left of an evaluation: nothing where it is finished."""
        of, run_id = evaluation.of, evaluation.run_id
        run = await self._pool(find_run, evaluation.name)
        if await self._pool(is_finished, evaluation):
            return
        board = _BesideBoard(self._board, of.rollouts, await self._pool(run_summary, run_id))
        context = replace(self._context, engine=self._context.engine.of_run(run_id))
        held = ExitStack()
        try:
            # Of a harness that died on another machine, this run's last heartbeat may be newer than the training run's.
            owning = owned(self._pool.blocking, run, wait_seconds=HEARTBEAT_SECONDS)
            claim = await asyncio.to_thread(held.enter_context, owning)
            await asyncio.to_thread(held.enter_context, claim.kept())
            context = replace(context, owner=claim.token)
            await _close_interrupted(context, run_id)
            self._board.beside = (f"evaluation of step {of.step}", board)
            await RunLoop(context, run_id, self._plan.run_plan, board, self._slots).go()
            self._board.say(point_line(of, await self._pool(points, [evaluation])))
        finally:
            self._board.beside = None
            try:
                await _close_interrupted(context, run_id)
            finally:
                await asyncio.to_thread(held.close)


async def _close_interrupted(context: RunContext, run_id: int) -> None:
    """Close the attempts of an evaluation that nobody works at."""
    await context.end_calls(await context.pool(still_open, context.owner, run_id=run_id))
    await context.pool(close_interrupted, run_id, context.owner)


class _BesideBoard(Board):
    """The board of an evaluation, which is shown on that of the training run."""

    def __init__(self, main: Board, expected: int, rows: Sequence[RolloutRow]):
        super().__init__(Console(quiet=True), expected, rows)
        self._main = main

    def say(self, text: str) -> None:
        self._main.say(text)

    def refresh(self) -> None:
        self._main.refresh()


@dataclass(frozen=True)
class RunWork:
    """What a run does, and where it is shown."""

    loop: RunLoop
    evaluator: Evaluator | None
    board: Board

    async def go(self) -> None:
        """Run to the end; a training run is evaluated beside that. When one of both fails, the other is cancelled."""
        if self.evaluator is None:
            return await self.loop.go()
        tasks = [asyncio.create_task(self.loop.go()), asyncio.create_task(self.evaluator.go())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
