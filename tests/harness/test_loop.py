"""The loop of a run against a real proxy: redundant attempts, filtered groups, the cap, several agents, slots."""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from sqlalchemy import select

from harness.agents.command import CommandAgent
from harness.agents.mix import Scaffold
from harness.async_pool import AsyncPool
from harness.loop import RunLoop, RunPlan, _RunningRollout
from harness.monitor.engine_presence import EnginePresence
from harness.monitor.progress import Board
from harness.rollout.context import Budgets, Cancellation, RunContext, StageSlots
from harness.setup.stack import RunningProxy
from harness.tasks import Task
from harness.tasks.mix import TaskMix, TaskSource
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.rule_states import monitor_lines
from proxy.pool.rollouts.groups import GroupOptions, Outcome, RolloutRow, finish_rollout, open_group, run_summary
from proxy.pool.rollouts.runs import open_run, set_queue_limit
from proxy.pool.schema import attempts, events, groups
from proxy.pool.training.interventions import Cause, drop_tasks, go_on, pause
from proxy.pool.training.steps import Published
from sandboxes.local.process import ProcessSandboxes
from sandboxes.local.processes import table
from tests.harness.conftest import HELLO, SHELL_AGENT, push
from tests.pool.make import publish_next

SHELL = Scaffold(name="shell", agent=CommandAgent(SHELL_AGENT))


@pytest.fixture
def context(proxy: RunningProxy, tmp_path: Path) -> Iterator[RunContext]:
    pool = open_pool(proxy.pool)
    yield RunContext(
        pool=AsyncPool(pool),
        sandboxes=ProcessSandboxes(tmp_path / "sandboxes"),
        url=f"{proxy.url}/v1",
        model=proxy.model,
        context_length=proxy.context_length,
        logs=tmp_path,
        trouble=proxy.trouble,
        end_calls=proxy.end_calls,
        engine=EnginePresence(proxy.url, proxy.admin_key),
        pause_seconds=0.01,
    )
    pool.close()


@pytest.fixture
def board() -> Board:
    return Board(Console(quiet=True), None)


@pytest.fixture
def run_id(context: RunContext) -> int:
    return open_run(context.pool.blocking, str(context.logs), "train", {}).id


@pytest.fixture
def go(context: RunContext, run_id: int, board: Board) -> Callable[..., Awaitable[list[RolloutRow]]]:
    """Run a plan to its end; the rollouts."""

    async def run(*, budgets: Budgets | None = None, **plan: Any) -> list[RolloutRow]:
        plan["mix"] = TaskMix([TaskSource("tests", plan.pop("tasks", [task()]))], revisit=plan.pop("revisit", None))
        what: dict[str, Any] = {"scaffolds": [SHELL], "group_size": 1, "concurrency": 4} | plan
        await RunLoop(replace(context, budgets=budgets or Budgets()), run_id, RunPlan(**what), board).go()
        return run_summary(context.pool.blocking, run_id)

    return run


def task(**fields: Any) -> Task:
    return msgspec.convert(HELLO | fields, Task)


def scaffold(name: str, command: str, **more: Any) -> Scaffold:
    return Scaffold(name=name, agent=CommandAgent(command), **more)


async def test_the_first_to_finish_are_kept_and_the_rest_end_at_once(
    go: Callable[..., Awaitable[list[RolloutRow]]], context: RunContext, run_id: int, board: Board
) -> None:
    first = context.logs / "first"  # two members go on for ever
    slow = scaffold("slow", f"{SHELL_AGENT}; mkdir {first}-1 2>&- || mkdir {first}-2 2>&- || exec sleep 635")
    rows = await go(scaffolds=[slow], group_size=2, redundant=2, concurrency=4)
    assert Counter((row.reward, row.failure) for row in rows) == {(1.0, None): 2, (None, "redundant"): 2}
    with context.pool.blocking.read() as connection:
        query = select(attempts.c.failure, attempts.c.closed_at).where(attempts.c.run_id == run_id)
        tries = connection.execute(query).all()
        states = connection.scalars(select(groups.c.state).where(groups.c.run_id == run_id)).all()
    assert Counter(row.failure for row in tries) == {None: 2, "redundant": 2}
    assert all(row.closed_at for row in tries) and states == ["DONE"]
    assert not [process for process in table() if process.sandbox.startswith(f"{os.getpid()}-")]
    assert "4 rollouts, 0 running" in board.line()


async def test_redundant_members_that_never_started_are_called_off_too(
    go: Callable[..., Awaitable[list[RolloutRow]]],
) -> None:
    rows = await go(group_size=1, redundant=2, concurrency=1)
    assert [(row.reward, row.failure, row.attempts) for row in rows] == [
        (1.0, None, 1),
        (None, "redundant", 0),
        (None, "redundant", 0),
    ]


async def test_work_that_no_verifier_can_judge_is_spoiled_and_alarms_when_it_comes_again(
    go: Callable[..., Awaitable[list[RolloutRow]]], context: RunContext, run_id: int
) -> None:
    agent = scaffold("spoiler", f"{SHELL_AGENT}; touch spoilt")
    judged = task(verifier={"command": "test ! -e spoilt || exit 2"})
    rows = await go(scaffolds=[agent], tasks=[judged], epochs=7, concurrency=1)
    assert [(row.reward, row.failure) for row in rows] == [(None, "spoiled")] * 7
    with context.pool.blocking.read() as connection:
        details = connection.scalars(select(events.c.detail).where(events.c.run_id == run_id)).all()
    assert [text.partition(" left")[0] for text in details if "avoid" in text] == [
        f"{number} of the last 64 rollouts of task 'hello'" for number in (3, 6)
    ]


async def test_a_hung_member_takes_its_group_along_and_a_new_one_comes(
    go: Callable[..., Awaitable[list[RolloutRow]]], context: RunContext
) -> None:
    once = context.logs / "hung"  # the first one
    alive = "(while sleep 0.5; do echo; done) &"
    agent = scaffold("shell", f"mkdir {once} 2>&- && exec sleep 636; {alive} {SHELL_AGENT}")
    rows = await go(scaffolds=[agent], group_size=2, concurrency=2, budgets=Budgets(hung_seconds=5))
    assert Counter((row.group, row.failure) for row in rows if row.group == 0)[0, "hung"] == 1
    assert [(row.reward, row.failure) for row in rows if row.group == 1] == [(1.0, None)] * 2
    assert len(rows) == 4


async def test_a_run_that_loses_most_of_its_groups_stops_and_says_so(
    go: Callable[..., Awaitable[list[RolloutRow]]], context: RunContext, run_id: int
) -> None:
    broken = [task(id=str(number), verifier={"command": "exit 2"}) for number in range(30)]
    with pytest.raises(UserError, match="11 of the last 11 groups of domain 'agent' were lost to failures"):
        await go(tasks=broken, concurrency=1)
    with context.pool.blocking.read() as connection:
        query = select(events.c.kind).where(events.c.run_id == run_id).order_by(events.c.id)
        kinds = connection.scalars(query).all()
    assert kinds == ["alarm"] * 7 + ["stop"]


async def test_a_run_goes_on_with_what_it_owes(
    go: Callable[..., Awaitable[list[RolloutRow]]], context: RunContext, run_id: int
) -> None:
    """A harness died after a group was filtered and before the new one was opened."""
    [member] = open_group(context.pool.blocking, run_id, HELLO, 1, GroupOptions(agent="shell"))
    finish_rollout(context.pool.blocking, member.rollout_id, Outcome(attempt_id=None, reward=None, failure="hung"))
    rows = await go()
    assert [(row.task, row.group, row.failure) for row in rows] == [("hello", 0, "hung"), ("hello", 1, None)]
    assert await go() == rows


async def test_a_run_skips_settled_tasks_and_gives_groups_the_budget_of_their_step(
    go: Callable[..., Awaitable[list[RolloutRow]]], context: RunContext, run_id: int, proxy: RunningProxy
) -> None:
    solved = task(id="solved", verifier={"command": "true"})
    turns = context.logs / "turns"  # solved at every second try
    learned = task(id="learned", verifier={"command": f"echo >> {turns}; exit $(( $(wc -l < {turns}) % 2 ))"})
    plan: dict[str, Any] = {"tasks": [solved, learned], "revisit": 0.001, "concurrency": 1, "tokens": ((0, 5), (1, 9))}
    await go(epochs=4, **plan)
    pool = context.pool.blocking
    for step in (0, 1):
        push(proxy, publish_next(pool, run_id, Published(step=step, checkpoint="c", hf_dir="h", metrics={})).name)
    rows = await go(epochs=6, **plan)
    assert Counter(row.task for row in rows) == {"solved": 3, "learned": 9}
    with pool.read() as connection:
        query = select(attempts.c.max_tokens).where(attempts.c.run_id == run_id).order_by(attempts.c.id)
        assert connection.scalars(query).all() == [5] * 8 + [9] * 4


async def test_a_run_that_opens_no_group_says_what_it_waits_for(
    go: Callable[..., Awaitable[list[RolloutRow]]], context: RunContext, run_id: int, proxy: RunningProxy, board: Board
) -> None:
    """Under `synchronous` that is its own slowest rollout, so it must not say that groups wait for the trainer."""
    pool = context.pool.blocking
    running = asyncio.ensure_future(go(until_step=1, epochs=None))
    await noted(board, "waiting for the trainer's first weights")
    push(proxy, publish_next(pool, run_id, Published(step=0, checkpoint="c", hf_dir="h", metrics={})).name)
    set_queue_limit(pool, run_id, 1)
    await noted(board, "open groups: 1 of 1, the trainer's limit")
    publish_next(pool, run_id, Published(step=1, checkpoint="c", hf_dir="h", metrics={}))
    assert len(await running) == 1


async def noted(board: Board, text: str) -> None:
    await becomes(lambda: board.note == text)


async def becomes(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():
            await asyncio.sleep(0.05)


async def test_a_paused_run_waits_and_dropped_tasks_are_cancelled_and_opened_no_more(
    go: Callable[..., Awaitable[list[RolloutRow]]], context: RunContext, run_id: int, proxy: RunningProxy, board: Board
) -> None:
    pool, cause = context.pool.blocking, Cause("cheated", "step 0: it shows")
    metrics = {"monitor_states": {"cheated": {"level": "alarm", "since": 0, "value": 1.0}}}
    push(proxy, publish_next(pool, run_id, Published(step=0, checkpoint="c", hf_dir="h", metrics=metrics)).name)
    set_queue_limit(pool, run_id, 2)
    tasks, agent = [task(id="a"), task(id="b")], scaffold("sleeper", "exec sleep 637")
    running = asyncio.ensure_future(go(until_step=1, epochs=None, tasks=tasks, scaffolds=[agent]))
    await becomes(lambda: board.running == 2)
    pause(pool, run_id, cause)
    drop_tasks(pool, run_id, ["b"], cause)
    await becomes(lambda: board.running == 1)
    await noted(board, "paused by the monitor's rule cheated; `trainer continue` ends it")
    await becomes(lambda: 'blackforge_monitor_state{rule="cheated",state="alarm"} 1.0' in board.rules.text())
    assert "blackforge_monitor_paused 1.0" in board.rules.text()
    lines = monitor_lines(pool, run_id)
    assert lines[0] == "monitor: cheated is in alarm since step 0, 1"
    assert lines[1].endswith(" pause by cheated: step 0: it shows; `trainer continue` ends it")
    assert go_on(pool, run_id) == 1
    await becomes(lambda: board.running == 2)
    drop_tasks(pool, run_id, ["a"], cause)
    with pytest.raises(UserError, match=r"has dropped every task of the run \(2\)"):
        await running
    rows = [(row.task, row.failure) for row in run_summary(pool, run_id)]
    assert Counter(rows) == {("a", "called_off"): 2, ("b", "called_off"): 1}


async def test_a_rollout_that_is_called_off_twice_counts_once_and_cleans_up(
    context: RunContext, run_id: int, board: Board
) -> None:
    """Two rules may drop tasks one after the other, while the first one's rollouts still stop their sandboxes."""
    loop = RunLoop(
        context,
        run_id,
        RunPlan(mix=TaskMix([TaskSource("t", [task()])]), scaffolds=[], group_size=1, concurrency=1),
        board,
    )
    cleaned = []

    async def rollout() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(True)

    loop._running[1] = _RunningRollout(asyncio.create_task(rollout()), Cancellation())
    await asyncio.sleep(0)
    for _ in range(2):
        loop._cancel([1], "called_off")
        await asyncio.sleep(0.01)
    await asyncio.gather(loop._running[1].task, return_exceptions=True)
    assert cleaned and "1 called_off" in board.line(), board.line()


async def test_agents_share_a_run_by_weight_and_those_held_out_are_not_trained(
    go: Callable[..., Awaitable[list[RolloutRow]]], context: RunContext, run_id: int
) -> None:
    scaffolds = [
        scaffold("one", SHELL_AGENT, weight=4),
        scaffold("two", f"{SHELL_AGENT}; true", held_out=True),
        scaffold("never", "exit 1", weight=0),
    ]
    rows = await go(tasks=[task(id=str(number)) for number in range(12)], scaffolds=scaffolds, seed=3)
    used = Counter(row.agent for row in rows)
    assert used.total() == 12 and used["one"] > used["two"] > 0 and set(used) == {"one", "two"}
    with context.pool.blocking.read() as connection:
        query = select(groups.c.agent, groups.c.purpose).where(groups.c.run_id == run_id).distinct()
        assert {(row.agent, row.purpose) for row in connection.execute(query)} == {("one", None), ("two", "eval")}


async def test_no_more_than_so_many_are_at_one_kind_of_work(context: RunContext, run_id: int, board: Board) -> None:
    """Two agents at a time, though six rollouts are at work."""
    command = (
        f"mkdir {context.logs}/at-work-$$; ls -d {context.logs}/at-work-* | wc -l >> {context.logs}/counts; "
        f"{SHELL_AGENT}; rmdir {context.logs}/at-work-$$"
    )
    limited = replace(context, slots=StageSlots(starting=6, agents=2, verifying=6))
    plan = RunPlan(
        mix=TaskMix([TaskSource("tests", [task()])]),
        scaffolds=[scaffold("shell", command)],
        group_size=6,
        concurrency=6,
    )
    await RunLoop(limited, run_id, plan, board).go()
    counts = [int(line) for line in (context.logs / "counts").read_text().split()]
    assert len(counts) == 6 and max(counts) <= 2
