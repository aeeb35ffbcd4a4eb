"""A training run is evaluated while it trains: in runs of their own, once for each version that is due."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from sqlalchemy import func, select, update

from harness.agents.command import CommandAgent
from harness.agents.mix import Scaffold
from harness.async_pool import AsyncPool
from harness.cli import main
from harness.environment.augment import Augment
from harness.evaluation.evaluator import Evaluator, RunWork
from harness.evaluation.plan import EvaluationPlan, engine_to_hold, is_due
from harness.loop import RunLoop, RunPlan
from harness.monitor.engine_presence import EnginePresence
from harness.monitor.progress import Board
from harness.rollout.context import RunContext
from harness.setup.stack import RunningProxy
from harness.tasks.mix import TaskMix, TaskSource
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.evaluated import matrix, points
from proxy.pool.processes.owners import STALE_SECONDS, this_process
from proxy.pool.rollouts.attempts import closed_among
from proxy.pool.rollouts.groups import run_summary
from proxy.pool.rollouts.runs import Run, admission, open_run, set_queue_limit
from proxy.pool.schema import attempts, groups, rollouts, runs
from proxy.pool.training.evaluations import evaluations, find_teacher, is_finished, open_evaluation
from proxy.pool.training.steps import Published, mark_pushed, versions
from sandboxes.local.process import ProcessSandboxes
from tests.harness.conftest import HELLO, SHELL_AGENT, push
from tests.harness.test_loop import task
from tests.harness.test_run import taken_over
from tests.pool.make import publish_next

LINE = Console(quiet=True)
TRAINED = Scaffold(name="trained", agent=CommandAgent(SHELL_AGENT))
HELD_OUT = Scaffold(name="other", agent=CommandAgent(f"{SHELL_AGENT}; true"), held_out=True, weight=0)
KNOWN, NEW = task(id="known"), task(id="new", timeout=61)


@pytest.fixture
def context(proxy: RunningProxy, tmp_path: Path) -> Iterator[RunContext]:
    pool = open_pool(proxy.pool)
    yield RunContext(
        pool=AsyncPool(pool), sandboxes=ProcessSandboxes(tmp_path / "sandboxes"), url=f"{proxy.url}/v1",
        model=proxy.model, context_length=proxy.context_length, logs=tmp_path, trouble=proxy.trouble,
        end_calls=proxy.end_calls, engine=EnginePresence(proxy.url, proxy.admin_key), pause_seconds=0.01,
    )  # fmt: skip
    pool.close()


@pytest.fixture
def run(context: RunContext) -> Run:
    run = open_run(context.pool.blocking, context.logs.name, "train", {})
    set_queue_limit(context.pool.blocking, run.id, 2)
    return run


def publish(pool: Pool, proxy: RunningProxy, run: Run, step: int) -> str:
    """Publish a step and give its version to the engine."""
    version = publish_next(pool, run.id, Published(step=step, checkpoint="c", hf_dir="h", metrics={}))
    push(proxy, version.name)
    mark_pushed(pool, version)
    return version.name


def work(
    context: RunContext, run: Run, proxy: RunningProxy, *, until_step: int, console: Console = LINE, **plan: Any
) -> tuple[RunWork, Evaluator]:
    """A run of the known task by the trained agent, and its evaluation at both tasks by both agents."""
    board, slots = Board(console, None), asyncio.Semaphore(3)
    mix = TaskMix([TaskSource("tests", plan.pop("tasks", [KNOWN, NEW]))])
    scaffolds = plan.pop("scaffolds", [TRAINED, HELD_OUT])
    options: dict[str, Any] = {"every": 2, "until_step": until_step, "concurrency": 3} | plan
    what = EvaluationPlan(mix=mix, scaffolds=scaffolds, **options)
    training = RunPlan(
        mix=TaskMix([TaskSource("tests", [KNOWN])]), scaffolds=[TRAINED, HELD_OUT], group_size=1, concurrency=3,
        until_step=until_step, epochs=None,
    )  # fmt: skip
    evaluator = Evaluator(context, run, what, proxy=proxy, board=board, slots=slots)
    return RunWork(RunLoop(context, run.id, training, board, slots), evaluator, board), evaluator


def steps_of(pool: Pool, run: Run) -> list[int]:
    return [each.of.step for each in evaluations(pool, run.id)]


async def until(holds: Any) -> None:
    async with asyncio.timeout(240):
        while not holds():
            await asyncio.sleep(0.05)


def test_a_version_is_due_at_multiples_and_at_the_end() -> None:
    plan = EvaluationPlan(mix=TaskMix([]), scaffolds=[], every=10, until_step=25, concurrency=1)
    due = [(0, None), (7, None), (10, 0), (13, 7), (20, 13), (25, 20), (27, 20)]
    assert all(is_due(step, last, plan) for step, last in due)
    assert not any(is_due(step, last, plan) for step, last in [(0, 0), (9, 0), (19, 13), (24, 20), (29, 25), (26, 25)])


async def test_every_agent_is_evaluated_at_every_task_beside_the_training_and_never_trained(
    context: RunContext, run: Run, proxy: RunningProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = context.pool.blocking
    first = publish(pool, proxy, run, 0)
    console = Console(file=StringIO(), width=400)
    going = asyncio.create_task(work(context, run, proxy, until_step=3, hold=True, console=console)[0].go())
    await until(lambda: len(points(pool, evaluations(pool, run.id))) == 4)
    publish(pool, proxy, run, 1)
    await asyncio.sleep(0.5)
    assert steps_of(pool, run) == [0]
    last = publish(pool, proxy, run, 3)  # step 2 was never seen
    await going
    assert steps_of(pool, run) == [0, 3] and {each.of.engine for each in evaluations(pool, run.id)} == {""}
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("eval_hold holds no engine: the proxy has one engine") == 1
    found = points(pool, evaluations(pool, run.id))
    cells = Counter((point.step, point.column.text) for point in found)
    assert cells == dict.fromkeys(
        ((step, f"{agent}, {tasks} tasks") for step in (0, 3) for agent in ("trained", "other (held out)")
         for tasks in ("trained", "held-out")), 1
    )  # fmt: skip
    assert all((point.rollouts, point.rewards, point.reward) == (1, 1, 1.0) for point in found)
    assert {(point.step, name) for point in found for name in point.versions} == {(0, first), (3, last)}
    with pool.read() as connection:
        own = connection.execute(select(groups.c.agent, groups.c.purpose).where(groups.c.run_id == run.id)).all()
    assert {(row.agent, row.purpose) for row in own} == {("trained", None)}
    with pool.read() as connection:
        evaluated = [each.run_id for each in evaluations(pool, run.id)]
        of_evaluations = select(func.count()).select_from(groups).where(groups.c.run_id.in_(evaluated))
        running = (
            select(func.count()).select_from(groups).where(groups.c.run_id == run.id, groups.c.state != "CONSUMED")
        )
        assert connection.scalar(of_evaluations) == 8
        assert admission(pool, run.id).open_groups == connection.scalar(running)  # evaluations take no place
    with pytest.raises(UserError, match=f"evaluates the run '{run.name}', so nothing is trained on it"):
        find_teacher(pool, found[0].run)
    rows = [row for row in matrix(pool) if row.run == run.name]
    assert [(row.step, row.trained, len(row.points)) for row in rows] == [(0, (), 4), (3, ("trained",), 4)]
    where = ["--pool", proxy.pool, "--name", run.name]
    assert main(["evaluations", *where]) == 0
    assert "other (held out), held-out tasks" in " ".join(capsys.readouterr().out.split())
    assert main(["evaluations", *where, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert len(whole["points"]) == 8 and whole["matrix"][-1]["trained"] == ["trained"]
    assert main(["evaluations", "--pool", proxy.pool, "--name", found[0].run]) == 2
    assert "was not evaluated; start it with --eval-tasks" in capsys.readouterr().err


async def test_no_engine_is_held_where_the_proxy_does_not_say_what_its_engines_serve(
    context: RunContext, run: Run, proxy: RunningProxy
) -> None:
    publish(context.pool.blocking, proxy, run, 1)
    console = Console(file=StringIO(), width=400)
    away = replace(proxy, url="http://127.0.0.1:9")
    await work(context, run, away, until_step=1, hold=True, console=console, tasks=[KNOWN])[1].go()
    [evaluation] = evaluations(context.pool.blocking, run.id)
    assert evaluation.of.engine == "" and await context.pool(is_finished, evaluation)
    assert "eval_hold holds no engine: the proxy does not answer" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_evaluation_without_a_finished_rollout_says_that(
    context: RunContext, run: Run, proxy: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = context.pool.blocking
    publish(pool, proxy, run, 3)
    open_evaluation(pool, run, versions(pool, run.id)[-1], {}, engine="", rollouts=1)
    assert main(["evaluations", "--pool", proxy.pool, "--name", run.name]) == 0
    assert capsys.readouterr().out == "the evaluation of step 3 has begun; no rollout has finished yet\n"


async def test_a_harness_that_starts_again_goes_on_with_its_evaluation_and_repeats_none(
    context: RunContext, run: Run, proxy: RunningProxy
) -> None:
    pool, gate = context.pool.blocking, context.logs / "gate"
    publish(pool, proxy, run, 0)
    slow = replace(HELD_OUT, agent=CommandAgent(f"while ! test -e {gate}; do sleep 0.1; done; {SHELL_AGENT}"))
    agents: dict[str, Any] = {"scaffolds": [TRAINED, slow], "tasks": [NEW]}
    going = asyncio.create_task(work(context, run, proxy, until_step=1, **agents)[1].go())

    def half() -> bool:
        return [row.finished for each in evaluations(pool, run.id) for row in run_summary(pool, each.run_id)] == [
            True, False,
        ]  # fmt: skip

    await until(half)
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    gate.touch()
    publish(pool, proxy, run, 1)
    await work(context, run, proxy, until_step=1, **agents)[1].go()
    assert steps_of(pool, run) == [0, 1]
    with pool.read() as connection:
        of = attempts.c.run_id == evaluations(pool, run.id)[0].run_id
        tries = connection.execute(select(attempts.c.agent, attempts.c.failure).where(of).order_by(attempts.c.id)).all()
    assert {tuple(row) for row in tries[:2]} == {("trained", None), ("other", "interrupted")}  # opened side by side
    assert {tuple(row) for row in tries[2:]} >= {("other", None)} and {row.agent for row in tries[2:]} == {"other"}
    rows = [row for each in evaluations(pool, run.id) for row in run_summary(pool, each.run_id)]
    assert [(row.agent, row.reward) for row in rows] == 2 * [("trained", 1.0), ("other", 1.0)]
    resumed = points(pool, evaluations(pool, run.id)[:1])  # the rest of it was sampled by what came meanwhile
    assert {point.agent: list(point.versions) for point in resumed} == {
        "trained": [versions(pool, run.id)[0].name],
        "other": [versions(pool, run.id)[1].name],
    }
    await work(context, run, proxy, until_step=1, **agents)[1].go()
    with pool.read() as connection:
        of = groups.c.run_id.in_([each.run_id for each in evaluations(pool, run.id)])
        assert connection.scalar(select(func.count()).select_from(rollouts).join(groups).where(of)) == 4


async def test_an_evaluation_goes_on_where_another_machine_stopped_without_varied_environments(
    context: RunContext, run: Run, proxy: RunningProxy
) -> None:
    pool = context.pool.blocking
    publish(pool, proxy, run, 1)
    agents: dict[str, Any] = {"scaffolds": [TRAINED], "tasks": [KNOWN, NEW]}
    evaluation = open_evaluation(
        pool, run, versions(pool, run.id)[-1], work(context, run, proxy, until_step=1, **agents)[1]._plan.config(),
        engine="", rollouts=2,
    )  # fmt: skip
    elsewhere = msgspec.structs.replace(this_process(), machine="elsewhere")
    last_beat = {"owner": msgspec.to_builtins(elsewhere), "owner_seen_at": time.time() - STALE_SECONDS + 1}
    with pool.write() as connection:
        connection.execute(update(runs).where(runs.c.id == evaluation.run_id).values(last_beat))
    await work(
        replace(context, augment=Augment(probability=1, timezone=["JST-9"])), run, proxy, until_step=1, **agents
    )[1].go()
    with pool.read() as connection:
        of = attempts.c.run_id == evaluation.run_id
        assert connection.scalars(select(attempts.c.augmentation).where(of)).all() == [[], []]


async def test_a_harness_whose_evaluation_was_taken_over_closes_its_own_attempts_only(
    context: RunContext, run: Run, proxy: RunningProxy
) -> None:
    pool = context.pool.blocking
    publish(pool, proxy, run, 1)
    began = context.logs / "began"
    slow = [replace(TRAINED, agent=CommandAgent(f"touch {began}; sleep 800"))]
    going = asyncio.create_task(work(context, run, proxy, until_step=1, scaffolds=slow, tasks=[KNOWN])[1].go())
    await until(began.exists)
    theirs = taken_over(pool, evaluations(pool, run.id)[0].run_id)
    going.cancel()
    await asyncio.gather(going, return_exceptions=True)
    assert closed_among(pool, [theirs.id - 1, theirs.id]) == {theirs.id - 1}


async def test_an_evaluation_that_fails_gives_its_run_up(context: RunContext, run: Run, proxy: RunningProxy) -> None:
    async def fails(_: Any) -> None:
        raise ConnectionError("the proxy is gone")

    publish(context.pool.blocking, proxy, run, 1)
    with pytest.raises(ConnectionError) as failure:
        await work(replace(context, end_calls=fails), run, proxy, until_step=1)[1].go()
    [evaluation] = evaluations(context.pool.blocking, run.id)
    assert failure.tb is not None  # while it lives, no garbage collection gives the run up
    with context.pool.blocking.read() as connection:
        assert connection.scalar(select(runs.c.owner).where(runs.c.id == evaluation.run_id)) is None


def test_the_last_of_several_engines_that_serve_a_version_is_held() -> None:
    assert engine_to_hold([("a", "v1"), ("b", "v1"), ("c", "v2")], "v1") == ("b", "")
    assert engine_to_hold([("a", "v1")], "v1")[0] == "" and "one engine" in engine_to_hold([("a", "v1")], "v1")[1]
    assert engine_to_hold([("a", "v2"), ("b", None)], "v1") == ("", "no engine of the proxy serves v1 any more")


def test_how_a_run_is_evaluated_is_refused_where_nothing_trains(tmp_path: Path, capsys: Any) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(HELLO) + "\n")
    words = ["run", str(tasks), "--agent", "command", "--command", "true"]
    assert main([*words, "--eval-tasks", str(tasks)]) == 2
    assert "set until_step, or use `harness eval`" in capsys.readouterr().err
    assert main([*words, "--until-step", "3", "--eval-hold"]) == 2
    assert "set eval_tasks too" in capsys.readouterr().err
