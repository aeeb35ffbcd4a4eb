"""`harness run`, `harness eval`, `harness collect`: run tasks for training, for evaluation or to collect examples.

`harness resume RUN_DIR` repeats the command that started the run in that directory.
"""

import argparse
import asyncio
import signal
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, closing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from harness.agents import INSTALLED
from harness.agents.mix import Scaffold, check_kinds, check_servers
from harness.anchors import Anchors
from harness.async_pool import AsyncPool
from harness.commands.evaluations import show_evaluations
from harness.commands.judge_options import add_judge, judge_at
from harness.environment.augment import of_run
from harness.environment.varied import check_unseen
from harness.evaluation.evaluator import Evaluator, RunWork
from harness.evaluation.plan import EvaluationPlan, evaluation_plan
from harness.integrity.watch import IntegrityWatch, judges_of
from harness.loop import RunLoop, RunPlan
from harness.monitor.engine_presence import EnginePresence
from harness.monitor.progress import Board, calls_table, closing_table, length_bias, make_console
from harness.monitor.rule_metrics import RuleMetrics
from harness.rewards.named import scorer_named
from harness.rollout.context import Budgets, RunContext, StageSlots
from harness.run_dir import RunDir, Whereabouts
from harness.settings import ACTIONS, ALL_KINDS, BUNDLES, SANDBOXES, WAYS, Settings, load_settings
from harness.setup import placement
from harness.setup.sandbox_choice import backend_for, choose, listening, runtimes_of
from harness.setup.stack import ProxyOptions, RunningProxy, check_tool_formats, service
from harness.tasks import Task
from harness.tasks.mix import TaskMix
from harness.tasks.sources import LoadedTasks, load_sources
from harness.tasks.stored import digest_of_tasks
from harness.verdict.judge import Judge
from harness.verdict.shared import shared_warning
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import PoolError, UserError
from proxy.pool.inspect.account import account, account_lines
from proxy.pool.inspect.evaluated import points
from proxy.pool.inspect.run_status import traffic
from proxy.pool.inspect.start_table import start_lines, start_table
from proxy.pool.inspect.trainable_calls import trainable_calls
from proxy.pool.processes.owners import RunClaim, owned
from proxy.pool.rollouts.attempts import close_interrupted, still_open
from proxy.pool.rollouts.groups import run_summary
from proxy.pool.rollouts.prompt_variations import PROMPT_KINDS
from proxy.pool.rollouts.runs import find_run, note_directory, open_run
from proxy.pool.rollouts.starts import solved_tasks
from proxy.pool.training.evaluations import evaluations
from proxy.pool.training.settled import settle_untrained
from sandboxes.base import Sandboxes

PURPOSES = {"run": "train", "eval": "eval", "collect": "collect"}
HELP = {
    "run": "run tasks and record the rollouts for training",
    "eval": "run tasks to evaluate a model",
    "collect": "run tasks to collect examples",
}
EXAMPLES = {
    "run": "harness run tasks.jsonl --agent opencode -n 8 --concurrency 16",
    "eval": "harness eval tasks.jsonl --agent mini-swe-agent --limit 20",
    "collect": "harness collect tasks.jsonl --agent codex -n 2",
}
METER_SECONDS = 2.0
"""Seconds between two updates of the board's rates."""
SETTLE_BEATS = 30
"""Updates of the rates between two updates of the kept sums, from which `harness watch` makes its account."""


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for verb in PURPOSES:
        run = verbs.add_parser(verb, help=HELP[verb], epilog=f"example: {EXAMPLES[verb]}")
        _add_options(run)
        run.set_defaults(call=_start, verb=verb)
    resume = verbs.add_parser(
        "resume", help="resume a run with the settings it was started with", epilog="example: harness resume runs/mixed"
    )
    resume.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    resume.set_defaults(call=_resume)


def _add_options(run: argparse.ArgumentParser) -> None:
    """Add the flags, without defaults and ranges: Settings has both, and a flag that is not given changes nothing."""
    sources = "JSONL file, Harbor task directory, directory of those, glob, or mix file (docs/tasks.md)"
    flags = "or the run's own TOML file, in which any of these flags may be a key (docs/runs.md)"
    run.add_argument("what", nargs="+", metavar="SOURCE|RUN.toml", help=f"{sources}; {flags}")
    run.add_argument("--agent", help=f"agent that works on the tasks: command, {', '.join(INSTALLED)}")
    run.add_argument("--command", metavar="CMD", help="command line of the agent 'command'")
    run.add_argument("-n", "--group-size", type=int, help="rollouts per task")
    run.add_argument("--redundant", type=int, help="extra rollouts per task; the last to finish are ended")
    run.add_argument("--concurrency", type=int, help="maximum rollouts at once")
    run.add_argument("--starting", type=int, help="maximum rollouts in set-up at once (default: --concurrency)")
    run.add_argument("--verifying", type=int, help="maximum verifiers at once (default: --concurrency)")
    run.add_argument("--seconds", type=float, help="time limit of an agent, if lower than its task's")
    run.add_argument("--turns", type=int, help="limit of model calls per attempt, if lower than its task's")
    tokens = "limit of sampled tokens per attempt, if lower than its task's; 0:4096,50:8192 is 8192 from step 50 on"
    run.add_argument("--tokens", type=_tokens, metavar="NUMBER|STEP:NUMBER,...", help=tokens)
    run.add_argument("--hung-seconds", type=float, help="end an agent that shows no sign of life")
    run.add_argument("--engine-patience", type=float, help="seconds to wait while no engine is up")
    run.add_argument("--run-dir", help="directory of the run (default: runs/<verb>-<tasks>-<agent>)")
    run.add_argument("--name", help="name of the run in the pool (default: name of the run directory)")
    run.add_argument("--proxy", metavar="URL", help="use this running proxy (default: start one)")
    run.add_argument("--admin-key-file", metavar="FILE", help="file with the running proxy's admin key")
    run.add_argument("--pool", metavar="URL", help="SQLite file or database URL (default: the proxy's pool)")
    run.add_argument("--model", metavar="DIR", help="model for the proxy to be started (default: a tiny random one)")
    run.add_argument("--scripted", metavar="FILE.py:NAME", help="start a scripted engine instead of a real one")
    run.add_argument(
        "--augment", type=_listed, metavar="KIND,...", help=f"vary what agents and models meet: {', '.join(ALL_KINDS)}"
    )
    run.add_argument("--resample", metavar="RUN", help="begin with the first turns of this run's recorded successes")
    run.add_argument("--anchors", choices=WAYS, help="how many: back until success drops, or any")
    run.add_argument("--sandbox", choices=SANDBOXES, help="kind of sandbox; auto: the first that works")
    run.add_argument("--image", help="Docker image of tasks that name none")
    run.add_argument("--show", action="append", metavar="PATH", help="path bubblewrap sandboxes may read; repeatable")
    run.add_argument("--relay", action="store_true", default=None, help="let Docker reach the proxy through a relay")
    run.add_argument("--bundles", choices=BUNDLES, help="how Docker mounts the agents")
    run.add_argument("--limit", type=int, help="use only this many tasks, from the first on")
    run.add_argument("--seed", type=int, help="seed of the order of tasks and agents")
    run.add_argument("--epochs", type=int, help="how often to run each task; 0: until stopped")
    run.add_argument("--reward", metavar="MODULE:NAME|FILE.toml", help="reward function or judges after the verifier")
    run.add_argument("--integrity", choices=ACTIONS, help="look for cheats: tell them, mask or zero rollouts with one")
    run.add_argument("--integrity-judge", metavar="FILE", help="judge file for rollouts that detectors name")
    run.add_argument("--integrity-share", type=float, help="share of the others that it looks at")
    add_judge(run, "that grades answers of tasks whose checker is a judge")
    run.add_argument("--until-step", type=int, help="feed a training run until it has published this step")
    run.add_argument("--eval-tasks", metavar="SOURCE", help="evaluate the trained policy on these tasks meanwhile")
    run.add_argument("--eval-every", type=int, help="train steps between two evaluations")
    run.add_argument("--eval-hold", action="store_true", default=None, help="hold an engine at the evaluated version")
    placement.add_options(run)
    usual = {field.name: field.default for field in msgspec.structs.fields(Settings)}
    for flag in run._actions:
        value = usual.get(flag.dest)
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            flag.help = f"{flag.help} (default: {value})"


def _tokens(text: str) -> int | list[list[int]]:
    try:
        if ":" not in text:
            return int(text)
        return [[int(number) for number in part.split(":")] for part in text.split(",")]
    except ValueError:
        way_out = "write a number as 8000, or numbers by step as 0:4000,50:8000"
        raise argparse.ArgumentTypeError(f"{text!r} is no limit of tokens; {way_out}") from None


def _listed(text: str) -> list[str]:
    """Split a text at its commas."""
    return text.split(",")


def _start(given: argparse.Namespace) -> int:
    flags = {key: value for key, value in vars(given).items() if key in Settings.__struct_fields__}
    return run(given.verb, load_settings(given.what, flags))


def _resume(given: argparse.Namespace) -> int:
    verb, settings = RunDir(given.run_dir).begun_with()
    return run(verb, msgspec.structs.replace(settings, run_dir=str(given.run_dir)))


def run(verb: str, settings: Settings) -> int:
    """Check everything that can be checked, then start the proxy, run, and show the results."""
    loaded = load_sources(settings.sources)
    mix = loaded.mix.first(settings.limit)
    evaluated = load_sources([settings.eval_tasks]) if settings.eval_tasks else None
    tasks = [*mix.tasks, *(evaluated.mix.tasks if evaluated else ())]
    judge = _judge(settings, tasks)
    needs_agent = bool(settings.agent or settings.agents) or any(task.domain == "agent" for task in tasks)
    scaffolds = settings.scaffolds(PURPOSES[verb]) if needs_agent else []
    check_servers(scaffolds, mix.tasks, evaluated.mix.tasks if evaluated else ())
    check_kinds(scaffolds, settings.augment)
    directory = RunDir(settings.where(verb))
    console = make_console()
    _say_left_out(console, loaded, evaluated)
    with directory.locked():
        hosts = placement.docker_hosts(settings)
        addresses = [host.address for host in hosts]
        choice = choose("docker" if hosts else settings.sandbox, tasks, addresses, runtimes_of(settings.runtime))
        check_unseen(mix.tasks, of_run(settings.augment), choice.kind)
        check_unseen(evaluated.mix.tasks if evaluated else (), None, choice.kind)
        config = _config(settings, mix) | {"sandbox": choice.kind}
        config |= {"eval_tasks": digest_of_tasks(evaluated.mix.tasks)} if evaluated else {}
        identity = {"name": settings.name or directory.path.name, "purpose": PURPOSES[verb]}
        if directory.resumes(config | identity):
            console.print(
                f"resuming the run in {directory.path}; name another with --run-dir to start a new one", highlight=False
            )
        console.print(str(choice), highlight=False)
        if warning := shared_warning(tasks, choice.kind):
            console.print(f"warning: {warning}", highlight=False, markup=False)
        with (
            placement.reaped(addresses, console),
            listening(choice, settings) as listeners,
            service(_proxy_options(settings, listeners), directory) as proxy,
            closing(open_pool(proxy.pool)) as pool,
        ):
            check_tool_formats(proxy, settings.augment)
            backend = backend_for(choice, settings, proxy, identity["name"])
            anchors = _anchors(settings, mix, pool, identity["name"])
            plan, rules = _plan(settings, mix, scaffolds, anchors), RuleMetrics()
            maker = placement.SandboxMaker(backend=backend, hosts=hosts, warm=settings.warm)
            sandboxes, logs = maker(), directory.logs
            context = make_context(proxy, settings, pool=pool, sandboxes=sandboxes, logs=logs)
            context = _with_scorers(context, settings, judge)
            metrics = placement.with_metrics(settings.metrics_port, sandboxes, directory.path, rules)
            with placement.placed(settings, context, maker) as placed:
                # Binds the name to these settings, so what cannot be used has been refused by now.
                stored_run = open_run(pool, identity["name"], identity["purpose"], config)
                with owned(pool, stored_run) as claim:
                    context = replace(placed, owner=claim.token, engine=placed.engine.of_run(stored_run.id))
                    directory.begin(config | identity, verb, settings)
                    expected = plan.expected()
                    note_directory(pool, stored_run.id, directory.path)
                    directory.write_whereabouts(Whereabouts(pool=proxy.pool, name=stored_run.name, expected=expected))
                    board = Board(console, expected, run_summary(pool, stored_run.id), rules)
                    evaluates = evaluation_plan(settings, evaluated.mix, scaffolds) if evaluated else None
                    work = _run_work(context, claim, plan, evaluates, proxy, board)
                    return _work(work, context, claim, directory, metrics)


def _run_work(
    context: RunContext,
    claim: RunClaim,
    plan: RunPlan,
    evaluates: EvaluationPlan | None,
    proxy: RunningProxy,
    board: Board,
) -> RunWork:
    """Make the work of a run. Its evaluations, where it has any, share the places of its rollouts."""
    slots = asyncio.Semaphore(plan.concurrency)
    loop = RunLoop(context, claim.run.id, plan, board, slots)
    if evaluates is None:
        return RunWork(loop, None, board)
    return RunWork(loop, Evaluator(context, claim.run, evaluates, proxy=proxy, board=board, slots=slots), board)


def _say_left_out(console: Console, *sources: LoadedTasks | None) -> None:
    """Say which tasks are not taken, and why."""
    for loaded in sources:
        for reason in loaded.refused if loaded else ():
            console.print(f"left out: {reason}", highlight=False)


def _judge(settings: Settings, tasks: Sequence[Task]) -> Judge | None:
    judge = judge_at(settings.judge, settings.judge_model, settings.judge_key_file)
    for task in tasks:
        if judge is None and task.checker is not None and task.checker.kind == "judge":
            raise UserError(f"the checker of task {task.id!r} is a judge; name its endpoint with --judge URL")
    return judge


def _with_scorers(context: RunContext, settings: Settings, judge: Judge | None) -> RunContext:
    """The context with what the settings name to score rollouts. UserError when something of it cannot be used."""
    scorer = scorer_named(settings.reward, context.pool) if settings.reward else None
    return replace(context, judge=judge, scorer=scorer, integrity=_integrity(settings, context.pool))


def _integrity(settings: Settings, pool: AsyncPool) -> IntegrityWatch | None:
    if settings.integrity is None:
        return None
    judges = judges_of(settings.integrity_judge, pool) if settings.integrity_judge else None
    return IntegrityWatch(action=settings.integrity, judges=judges, share=settings.integrity_share, seed=settings.seed)


def _proxy_options(settings: Settings, listeners: Mapping[str, str]) -> ProxyOptions:
    return ProxyOptions(
        proxy=settings.proxy,
        pool=settings.pool,
        model=None if settings.model is None else Path(settings.model),
        admin_key_file=None if settings.admin_key_file is None else Path(settings.admin_key_file),
        script=settings.scripted,
        for_sandboxes=listeners,
    )


def _config(settings: Settings, mix: TaskMix) -> dict[str, Any]:
    """The settings that must not change when a run is resumed, without the optional ones that are not used."""
    config = {
        "tasks": digest_of_tasks(mix.tasks),
        "agent": settings.agent,
        "command": settings.command,
        "group_size": settings.group_size,
        "seed": settings.seed,
    }
    optional = {
        "weights": mix.weights(),
        "agents": [msgspec.to_builtins(entry) for entry in settings.agents],
        "redundant": settings.redundant,
        "seconds": settings.seconds,
        "turns": settings.turns,
        "tokens": list(map(list, settings.tokens)) if isinstance(settings.tokens, tuple) else settings.tokens,
        "revisit": mix.revisit,
        "augment": list(settings.augment),
        "judge": [settings.judge, settings.judge_model] if settings.judge else None,
        "reward": settings.reward,
        "integrity": [settings.integrity, settings.integrity_judge, settings.integrity_share]
        if settings.integrity
        else None,
        "resample": [settings.resample, settings.anchors] if settings.resample else None,
    }
    return config | {key: value for key, value in optional.items() if value}


def _anchors(settings: Settings, mix: TaskMix, pool: Pool, name: str) -> Anchors | None:
    """Decide how the run `name` begins its groups with recorded successes, and print how many there are.

    UserError when the run that recorded them is not in the pool.
    """
    if settings.resample is None:
        return None
    if settings.resample != name:
        find_run(pool, settings.resample)
    solved = solved_tasks(pool, settings.resample)
    known = sum(task.id in solved for task in mix.tasks)
    make_console().print(
        f"{known} of {len(mix.tasks)} tasks have a success in the run {settings.resample!r} to begin with; "
        "the others begin at the beginning", highlight=False,
    )  # fmt: skip
    return Anchors(run=settings.resample, way=settings.anchors, seed=settings.seed)


def _plan(settings: Settings, mix: TaskMix, scaffolds: Sequence[Scaffold], anchors: Anchors | None) -> RunPlan:
    endless = settings.epochs == 0 or settings.until_step is not None
    return RunPlan(
        mix=mix,
        scaffolds=scaffolds,
        group_size=settings.group_size,
        redundant=settings.redundant,
        concurrency=settings.concurrency,
        seed=settings.seed,
        epochs=None if endless else settings.epochs,
        until_step=settings.until_step,
        tokens=settings.tokens if isinstance(settings.tokens, tuple) else (),
        anchors=anchors,
    )


def make_context(
    proxy: RunningProxy, settings: Settings, *, pool: Pool, sandboxes: Sandboxes, logs: Path
) -> RunContext:
    """Make the context that all rollouts of a run with these settings share."""
    all_rollouts = settings.concurrency
    return RunContext(
        pool=AsyncPool(pool),
        sandboxes=sandboxes,
        url=f"{proxy.url}/v1",
        model=proxy.model,
        context_length=proxy.context_length,
        logs=logs,
        trouble=proxy.trouble,
        end_calls=proxy.end_calls,
        engine=EnginePresence(proxy.url, proxy.admin_key, settings.engine_patience),
        slots=StageSlots(
            starting=settings.starting or all_rollouts,
            agents=all_rollouts,
            verifying=settings.verifying or all_rollouts,
        ),
        budgets=Budgets(
            seconds=settings.seconds,
            turns=settings.turns,
            tokens=settings.tokens if isinstance(settings.tokens, int) else None,
            hung_seconds=settings.hung_seconds,
        ),
        augment=of_run(settings.augment) if settings.augment else None,
        prompt_kinds=tuple(kind for kind in PROMPT_KINDS if kind in settings.augment),
        seed=settings.seed,
    )


def _work(
    work: RunWork,
    context: RunContext,
    claim: RunClaim,
    directory: RunDir,
    metrics: AbstractAsyncContextManager[None],
) -> int:
    """Do the work; then, also after an interruption, write the results and show a table."""
    console, board, run_id, pool = make_console(), work.board, claim.run.id, context.pool.blocking
    interrupted = _close_interrupted(context, run_id)
    if interrupted:
        board.say(f"{interrupted} attempts were interrupted and start again")
    try:
        with board.live():
            asyncio.run(_within(metrics, context, _until_done(work, claim, context.pool)))
    finally:
        _close_interrupted(context, run_id)  # an attempt may be opened in the moment of its cancellation
        rows = run_summary(pool, run_id)
        file = directory.write_results(rows)
        console.print(closing_table(rows))
        if clients := trainable_calls(pool, run_id):
            console.print(calls_table(clients))
        settle_untrained(pool, run_id)
        shown = [*start_lines(start_table(pool, run_id)), *account_lines(account(pool, run_id))]
        console.print(*shown, sep="\n", soft_wrap=True)
        if work.evaluator is not None and (evaluated := points(pool, evaluations(pool, run_id))):
            show_evaluations(console, pool, evaluated)
        if bias := length_bias(rows):
            board.say(bias)
        board.say(f"{board.line()}; results: {file}")
    return 0


def _close_interrupted(context: RunContext, run_id: int) -> int:
    """Close the attempts of a run that nobody works at; return how many there were."""
    pool = context.pool.blocking
    asyncio.run(context.end_calls(still_open(pool, context.owner, run_id=run_id)))
    return close_interrupted(pool, run_id, context.owner)


async def _within(
    metrics: AbstractAsyncContextManager[None], context: RunContext, work: Coroutine[Any, Any, None]
) -> None:
    try:
        async with metrics:
            await work
    finally:
        if context.scorer is not None:
            await context.scorer.close()
        if context.integrity is not None:
            await context.integrity.close()


async def _until_done(run_work: RunWork, claim: RunClaim, pool: AsyncPool) -> None:
    """Work while this process owns the run.

    The first SIGTERM or Ctrl-C cancels the work. Further ones are ignored, so that its clean-up is not cut short.
    """
    work, keeping = asyncio.create_task(run_work.go()), asyncio.create_task(claim.keep())
    metering = asyncio.create_task(_meter(run_work.board, pool, claim.run.id))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: work.cancelling() or work.cancel())
    try:
        await asyncio.wait({work, keeping}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            keeping.result()  # raises the reason: the run was lost to another process
        await work
    finally:
        keeping.cancel()
        metering.cancel()


async def _meter(board: Board, pool: AsyncPool, run_id: int) -> None:
    """Keep the board's rates and the kept sums up to date. A pool that fails here is no reason to end a run."""
    for beat in count(1):
        with suppress(PoolError):
            board.rate.take(await pool(traffic, run_id, board.rate.last))
            if beat % SETTLE_BEATS == 0:
                await pool(settle_untrained, run_id)
        await asyncio.sleep(METER_SECONDS)
