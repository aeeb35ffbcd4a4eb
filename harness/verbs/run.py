"""`harness run`, `harness eval` and `harness collect`: the same run, for training, for evaluation or as examples."""

import argparse
import asyncio
import hashlib
import signal
from pathlib import Path
from typing import Any

import msgspec

from harness.agents import INSTALLED, agent_named
from harness.agents.base import Agent
from harness.agents.install import agents_directory
from harness.books import Books
from harness.mix import Scaffold
from harness.progress import Board, closing_table, make_console
from harness.rollout import Bench
from harness.run import Loop, Plan
from harness.rundir import RunDir
from harness.services import Service, Wanted, service
from harness.tasks.mix import Mix
from harness.tasks.sources import load_sources
from proxy.pool.attempts import close_interrupted
from proxy.pool.database import Pool, open_pool
from proxy.pool.groups import run_summary
from proxy.pool.owners import Claim, owned
from proxy.pool.runs import open_run
from sandboxes.leftovers import collect
from sandboxes.process import ProcessSandboxes

PURPOSES = {"run": "train", "eval": "eval", "collect": "collect"}


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    for verb, purpose in PURPOSES.items():
        run = verbs.add_parser(verb, help=f"run tasks, to {purpose}")
        _add_options(run)
        run.set_defaults(call=_run, verb=verb)


def _add_options(run: argparse.ArgumentParser) -> None:
    sources = "JSONL file, Harbor task directory, directory of those, glob, or mix file (docs/tasks.md)"
    run.add_argument("tasks", nargs="+", metavar="SOURCE", help=sources)
    run.add_argument("--agent", required=True, help=f"command, {', '.join(INSTALLED)}")
    run.add_argument("--command", metavar="CMD", help="command line of the agent 'command'")
    run.add_argument("-n", "--group-size", type=_positive, default=1, help="rollouts per task (%(default)s)")
    run.add_argument("--concurrency", type=_positive, default=4, help="agents at work at a time (%(default)s)")
    run.add_argument("--run-dir", type=Path, help="where the run lives, to resume it (runs/<verb>-<tasks>-<agent>)")
    run.add_argument("--name", help="name of the run in the pool (name of the run directory)")
    run.add_argument("--proxy", metavar="URL", help="a running proxy; without it, one is brought up")
    run.add_argument("--admin-key-file", type=Path, metavar="FILE", help="the running proxy's admin key, if it has one")
    run.add_argument("--pool", metavar="URL", help="SQLite file or database URL (the proxy's)")
    run.add_argument("--model", type=Path, metavar="DIR", help="model for the proxy that is brought up (a tiny one)")
    run.add_argument("--scripted", metavar="FILE.py:NAME", help="bring up a scripted engine in place of the real one")
    run.add_argument("--limit", type=_positive, help="take the first tasks only")
    run.add_argument("--seed", type=int, default=0, help="of the order of tasks (%(default)s)")
    run.add_argument("--epochs", type=_positive, default=1, help="how often to run each task (%(default)s)")
    run.add_argument("--repeat", action="store_true", help="go through the tasks until stopped")
    run.add_argument("--until-step", type=_positive, help="feed a training run until it has published this step")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {text}")
    return number


def _run(given: argparse.Namespace) -> int:
    """Check everything that can be checked, then bring up the proxy, run, and show what came out."""
    loaded = load_sources(given.tasks)
    mix = loaded.mix.first(given.limit)
    agent = agent_named(given.agent, given.command)
    directory = RunDir(given.run_dir or Path("runs") / f"{given.verb}-{Path(given.tasks[0]).stem}-{given.agent}")
    console = make_console()
    for reason in loaded.refused:
        console.print(f"left out: {reason}", highlight=False)
    with directory.held():
        config = _config(given, mix)
        identity = {"name": given.name or directory.path.name, "purpose": PURPOSES[given.verb]}
        if directory.resumes(config | identity):
            console.print(f"resuming the run in {directory.path}; --run-dir starts another", highlight=False)
        collect()  # what a killed run left at work
        wanted = Wanted(
            proxy=given.proxy,
            pool=given.pool,
            model=given.model,
            admin_key_file=given.admin_key_file,
            script=given.scripted,
        )
        if wanted.proxy is None:
            console.print("bringing up an engine and a proxy ...", highlight=False)
        with service(wanted, directory) as proxy:
            pool = open_pool(proxy.pool)
            run = open_run(pool, identity["name"], identity["purpose"], config)
            bench = _bench(proxy, pool, agent, directory)
            try:
                with owned(pool, run) as claim:
                    directory.begin(config | identity)
                    return _work(_plan(given, mix, agent), bench, claim, directory)
            finally:
                pool.close()


def _config(given: argparse.Namespace, mix: Mix) -> dict[str, Any]:
    """What a resumed run must have in common with its beginning."""
    digest = hashlib.sha256(msgspec.json.encode(mix.tasks)).hexdigest()[:16]
    weights = {"weights": mix.weights()} if mix.weights() else {}
    return weights | {
        "tasks": digest,
        "agent": given.agent,
        "command": given.command,
        "group_size": given.group_size,
        "seed": given.seed,
    }


def _plan(given: argparse.Namespace, mix: Mix, agent: Agent) -> Plan:
    endless = given.repeat or given.until_step is not None
    return Plan(
        mix=mix,
        scaffolds=[Scaffold(name=agent.name, agent=agent)],
        group_size=given.group_size,
        concurrency=given.concurrency,
        seed=given.seed,
        epochs=None if endless else given.epochs,
        until_step=given.until_step,
    )


def _bench(proxy: Service, pool: Pool, agent: Agent, directory: RunDir) -> Bench:
    return Bench(
        books=Books(pool),
        sandboxes=ProcessSandboxes(bundles=agents_directory()),
        agent=agent,
        url=f"{proxy.url}/v1",
        model=proxy.model,
        context_length=proxy.context_length,
        logs=directory.logs,
        trouble=proxy.trouble,
    )


def _work(plan: Plan, bench: Bench, claim: Claim, directory: RunDir) -> int:
    """Run the plan in full, then results and table; also when it is interrupted."""
    console, run = make_console(), claim.run
    board = Board(console, plan.expected(), run_summary(bench.books.pool, run.id))
    interrupted = close_interrupted(bench.books.pool, run.id)
    if interrupted:
        board.say(f"{interrupted} attempts were interrupted and start again")
    try:
        with board.live():
            asyncio.run(_until_done(Loop(bench, run.id, plan, board), claim))
    finally:
        close_interrupted(bench.books.pool, run.id)  # opened, and cancelled in the same moment
        rows = run_summary(bench.books.pool, run.id)
        file = directory.write_results(rows)
        console.print(closing_table(rows))
        board.say(f"{board.line()}; results: {file}")
    return 0


async def _until_done(loop: Loop, claim: Claim) -> None:
    """Run the loop while the run is ours; the first SIGTERM or Ctrl-C cancels it, further ones change nothing."""
    work, keeping = asyncio.create_task(loop.go()), asyncio.create_task(claim.keep())
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
