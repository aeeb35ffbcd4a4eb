"""`harness run`, `harness eval`, `harness collect`: the same run, for training, for evaluation or as examples.

`harness resume RUN_DIR` repeats the command that a directory was begun with.
"""

import argparse
import asyncio
import hashlib
import signal
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from harness.agents import INSTALLED
from harness.agents.mix import Scaffold
from harness.async_pool import AsyncPool
from harness.commands.judge_options import add_judge, judge_at
from harness.environment.augment import KINDS, of_run
from harness.loop import RunLoop, RunPlan
from harness.monitor.progress import Board, closing_table, length_bias, make_console
from harness.rollout import Budgets, RunContext, StageSlots
from harness.run_dir import RunDir, Whereabouts
from harness.settings import IMAGE, SANDBOXES, Settings, load_settings
from harness.setup import placement
from harness.setup.sandbox_choice import backend_for, choose, listening
from harness.setup.stack import ProxyOptions, RunningProxy, service
from harness.tasks.mix import TaskMix
from harness.tasks.sources import load_sources
from harness.verdict.judge import Judge
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import PoolError, UserError
from proxy.pool.inspect.run_status import traffic
from proxy.pool.processes.owners import RunClaim, owned
from proxy.pool.rollouts.attempts import close_interrupted
from proxy.pool.rollouts.groups import run_summary
from proxy.pool.rollouts.runs import open_run
from sandboxes.base import Sandboxes

PURPOSES = {"run": "train", "eval": "eval", "collect": "collect"}
METER_SECONDS = 2.0


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for verb, purpose in PURPOSES.items():
        run = verbs.add_parser(verb, help=f"run tasks, to {purpose}")
        _add_options(run)
        run.set_defaults(call=_start, verb=verb)
    resume = verbs.add_parser("resume", help="go on with a run")
    resume.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    resume.set_defaults(call=_resume)


def _add_options(run: argparse.ArgumentParser) -> None:
    """Flags have no defaults here: what is not given is the file's matter, and harness/settings.py's."""
    sources = "JSONL file, Harbor task directory, directory of those, glob, or mix file (docs/tasks.md)"
    flags = "or the run's own TOML file, with any of these flags as keys (docs/runs.md)"
    run.add_argument("what", nargs="+", metavar="SOURCE|RUN.toml", help=f"{sources}; {flags}")
    run.add_argument("--agent", help=f"command, {', '.join(INSTALLED)}")
    run.add_argument("--command", metavar="CMD", help="command line of the agent 'command'")
    run.add_argument("-n", "--group-size", type=_positive, help="rollouts per task (1)")
    run.add_argument("--redundant", type=int, help="more of them, the last to finish being called off (0)")
    run.add_argument("--concurrency", type=_positive, help="rollouts at work at a time (4)")
    run.add_argument("--starting", type=_positive, help="of them, being set up (all)")
    run.add_argument("--verifying", type=_positive, help="of them, being verified (all)")
    run.add_argument("--seconds", type=float, help="time of an agent, at most (its task's)")
    run.add_argument("--turns", type=_positive, help="model calls of an attempt, at most (its task's)")
    run.add_argument("--tokens", type=_positive, help="sampled tokens of an attempt, at most (its task's)")
    run.add_argument("--hung-seconds", type=float, help="without any sign of life (3600)")
    run.add_argument("--run-dir", help="where the run lives, to resume it (runs/<verb>-<tasks>-<agent>)")
    run.add_argument("--name", help="name of the run in the pool (name of the run directory)")
    run.add_argument("--proxy", metavar="URL", help="a running proxy; without it, one is brought up")
    run.add_argument("--admin-key-file", metavar="FILE", help="the running proxy's admin key, if it has one")
    run.add_argument("--pool", metavar="URL", help="SQLite file or database URL (the proxy's)")
    run.add_argument("--model", metavar="DIR", help="model for the proxy that is brought up (a tiny one)")
    run.add_argument("--scripted", metavar="FILE.py:NAME", help="bring up a scripted engine in place of the real one")
    run.add_argument("--augment", type=listed, metavar="KIND,...", help=f"vary environments: {', '.join(KINDS)}")
    run.add_argument("--sandbox", choices=SANDBOXES, help="kind of the sandboxes (auto: the first of these that works)")
    run.add_argument("--image", help=f"of tasks that name none, in Docker ({IMAGE})")
    run.add_argument("--show", action="append", metavar="PATH", help="let bubblewrap sandboxes read it, once for each")
    run.add_argument("--relay", action="store_true", default=None, help="Docker reaches the proxy through a relay")
    run.add_argument("--bundles", choices=("volume", "bind"), help="how Docker's sandboxes get their agents (volume)")
    run.add_argument("--limit", type=_positive, help="take the first tasks only")
    run.add_argument("--seed", type=int, help="of the order of tasks and agents (0)")
    run.add_argument("--epochs", type=_positive, help="how often to run each task (1)")
    run.add_argument("--repeat", action="store_true", default=None, help="go through the tasks until stopped")
    add_judge(run, "to grade answers of tasks whose checker is a judge")
    run.add_argument("--until-step", type=_positive, help="feed a training run until it has published this step")
    placement.add_options(run)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {text}")
    return number


def listed(text: str) -> list[str]:
    """What stands between commas."""
    return text.split(",")


def _start(given: argparse.Namespace) -> int:
    flags = {key: value for key, value in vars(given).items() if key in Settings.__struct_fields__}
    return run(given.verb, load_settings(given.what, flags))


def _resume(given: argparse.Namespace) -> int:
    verb, settings = RunDir(given.run_dir).begun_with()
    return run(verb, msgspec.structs.replace(settings, run_dir=str(given.run_dir)))


def run(verb: str, settings: Settings) -> int:
    """Check everything that can be checked, then bring up the proxy, run, and show what came out."""
    loaded = load_sources(settings.sources)
    mix = loaded.mix.first(settings.limit)
    judge = _judge(settings, mix)
    asked = bool(settings.agent or settings.agents) or any(task.domain == "agent" for task in mix.tasks)
    scaffolds = settings.scaffolds(PURPOSES[verb]) if asked else []
    directory = RunDir(settings.where(verb))
    console = make_console()
    for reason in loaded.refused:
        console.print(f"left out: {reason}", highlight=False)
    with directory.held():
        engines = placement.engines_of(settings)
        addresses = [engine.address for engine in engines]
        choice = choose("docker" if engines else settings.sandbox, mix.tasks, addresses)
        config = _config(settings, mix) | {"sandbox": choice.kind}
        identity = {"name": settings.name or directory.path.name, "purpose": PURPOSES[verb]}
        if directory.resumes(config | identity):
            console.print(f"resuming the run in {directory.path}; --run-dir starts another", highlight=False)
        console.print(str(choice), highlight=False)
        if settings.proxy is None:
            console.print("bringing up an engine and a proxy ...", highlight=False)
        with (
            placement.reaped(addresses, console),
            listening(choice, settings) as listeners,
            service(_wanted(settings, listeners), directory) as proxy,
        ):
            backend = backend_for(choice, settings, proxy, identity["name"])
            pool = open_pool(proxy.pool)
            found = open_run(pool, identity["name"], identity["purpose"], config)
            plan = _plan(settings, mix, scaffolds)
            try:
                with owned(pool, found) as claim:
                    maker = placement.SandboxMaker(backend=backend, hosts=engines, warm=settings.warm)
                    sandboxes, logs = maker(), directory.logs
                    context = make_context(proxy, settings, pool=pool, sandboxes=sandboxes, logs=logs)
                    shown = placement.watched(settings, sandboxes)
                    with placement.placed(settings, replace(context, judge=judge), maker) as placed:
                        directory.begin(config | identity, verb, settings)
                        directory.tell(Whereabouts(pool=proxy.pool, name=found.name, expected=plan.expected()))
                        return _work(plan, placed, claim, directory, shown)
            finally:
                pool.close()


def _judge(settings: Settings, mix: TaskMix) -> Judge | None:
    judge = judge_at(settings.judge, settings.judge_model, settings.judge_key_file)
    for task in mix.tasks:
        if judge is None and task.checker is not None and task.checker.kind == "judge":
            raise UserError(f"the checker of task {task.id!r} is a judge; name its endpoint with --judge URL")
    return judge


def _wanted(settings: Settings, listeners: Mapping[str, str]) -> ProxyOptions:
    return ProxyOptions(
        proxy=settings.proxy,
        pool=settings.pool,
        model=None if settings.model is None else Path(settings.model),
        admin_key_file=None if settings.admin_key_file is None else Path(settings.admin_key_file),
        script=settings.scripted,
        for_sandboxes=listeners,
    )


def _config(settings: Settings, mix: TaskMix) -> dict[str, Any]:
    """What a resumed run must have in common with its beginning. Keys of what is not used are left out."""
    digest = hashlib.sha256(msgspec.json.encode(mix.tasks)).hexdigest()[:16]
    config = {
        "tasks": digest,
        "agent": settings.agent,
        "command": settings.command,
        "group_size": settings.group_size,
        "seed": settings.seed,
    }
    more = {
        "weights": mix.weights(),
        "agents": [msgspec.to_builtins(entry) for entry in settings.agents],
        "redundant": settings.redundant,
        "seconds": settings.seconds,
        "turns": settings.turns,
        "tokens": settings.tokens,
        "augment": list(settings.augment),
        "judge": [settings.judge, settings.judge_model] if settings.judge else None,
    }
    return config | {key: value for key, value in more.items() if value}


def _plan(settings: Settings, mix: TaskMix, scaffolds: Sequence[Scaffold]) -> RunPlan:
    endless = settings.repeat or settings.until_step is not None
    return RunPlan(
        mix=mix,
        scaffolds=scaffolds,
        group_size=settings.group_size,
        redundant=settings.redundant,
        concurrency=settings.concurrency,
        seed=settings.seed,
        epochs=None if endless else settings.epochs,
        until_step=settings.until_step,
    )


def make_context(
    proxy: RunningProxy, settings: Settings, *, pool: Pool, sandboxes: Sandboxes, logs: Path
) -> RunContext:
    """What the rollouts of a run with these settings share."""
    everybody = settings.concurrency
    return RunContext(
        pool=AsyncPool(pool),
        sandboxes=sandboxes,
        url=f"{proxy.url}/v1",
        model=proxy.model,
        context_length=proxy.context_length,
        logs=logs,
        trouble=proxy.trouble,
        slots=StageSlots(
            starting=settings.starting or everybody,
            agents=everybody,
            verifying=settings.verifying or everybody,
        ),
        budgets=Budgets(
            seconds=settings.seconds,
            turns=settings.turns,
            tokens=settings.tokens,
            hung_seconds=settings.hung_seconds,
        ),
        augment=of_run(settings.augment) if settings.augment else None,
        seed=settings.seed,
    )


def _work(
    plan: RunPlan, context: RunContext, claim: RunClaim, directory: RunDir, watched: AbstractAsyncContextManager[None]
) -> int:
    """Run the plan in full, then results and table; also when it is interrupted."""
    console, found, pool = make_console(), claim.run, context.pool.blocking
    board = Board(console, plan.expected(), run_summary(pool, found.id))
    interrupted = close_interrupted(pool, found.id)
    if interrupted:
        board.say(f"{interrupted} attempts were interrupted and start again")
    try:
        with board.live():
            asyncio.run(
                _within(watched, _until_done(RunLoop(context, found.id, plan, board), claim, board, context.pool))
            )
    finally:
        close_interrupted(pool, found.id)  # opened, and cancelled in the same moment
        rows = run_summary(pool, found.id)
        file = directory.write_results(rows)
        console.print(closing_table(rows))
        if bias := length_bias(rows):
            board.say(bias)
        board.say(f"{board.line()}; results: {file}")
    return 0


async def _within(context: AbstractAsyncContextManager[None], work: Coroutine[Any, Any, None]) -> None:
    async with context:
        await work


async def _until_done(loop: RunLoop, claim: RunClaim, board: Board, pool: AsyncPool) -> None:
    """Run the loop while the run is ours; the first SIGTERM or Ctrl-C cancels it, further ones change nothing."""
    work, keeping = asyncio.create_task(loop.go()), asyncio.create_task(claim.keep())
    metering = asyncio.create_task(_meter(board, pool, claim.run.id))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: work.cancelling() or work.cancel())
    try:
        await asyncio.wait({work, keeping}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            keeping.result()  # raises what ended it
        await work
    finally:
        keeping.cancel()
        metering.cancel()


async def _meter(board: Board, pool: AsyncPool, run_id: int) -> None:
    """Keep the board's rates up to date. What the pool refuses to tell is no reason to end a run."""
    while True:
        with suppress(PoolError):
            board.rate.take(await pool(traffic, run_id, board.rate.last))
        await asyncio.sleep(METER_SECONDS)
