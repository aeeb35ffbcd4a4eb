"""`harness validate`: tests tasks before they are trusted. The same command goes on where it was stopped."""

import argparse
import asyncio
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness.commands.judge_options import add_judge, judge_at
from harness.environment.augment import KINDS, of_run
from harness.monitor.progress import make_console
from harness.run_dir import RunDir
from harness.settings import IMAGE, SANDBOXES
from harness.setup.placement import SandboxMaker
from harness.setup.sandbox_choice import Backend, choose
from harness.tasks.sources import load_sources
from harness.validation.review import VERDICTS, Finding
from harness.validation.runner import ValidationPlan, ValidationResults, on_places, prove
from harness.verdict.judge import PAUSE_SECONDS
from proxy.pool.errors import UserError
from sandboxes.base import Sandboxes
from sandboxes.gc import remove_leftovers


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser(
        "validate",
        help="test tasks: the oracle solution must pass, doing nothing must not",
        epilog="example: harness validate tasks.jsonl --repeat 3 --concurrency 8",
    )
    verb.add_argument("tasks", nargs="+", metavar="SOURCE", help="task sources, as for `harness run`")
    verb.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for the results (default: runs/validate-<tasks>)"
    )
    verb.add_argument("--repeat", type=_count, default=2, help="trials of each kind, to find flaky tasks (default: 2)")
    verb.add_argument("--concurrency", type=_count, default=4, help="maximum trials at once (default: 4)")
    verb.add_argument(
        "--augment", action="store_true", help="also try the oracle under each variation that a task declares"
    )
    verb.add_argument(
        "--kinds", type=_kinds, default=[], metavar="KIND,...", help="variations for tasks that declare none"
    )
    verb.add_argument(
        "--sandbox", choices=SANDBOXES, default="auto", help="kind of sandbox (default: auto, the first that works)"
    )
    verb.add_argument("--image", default=IMAGE, help="Docker image of tasks that name none (default: %(default)s)")
    add_judge(verb, "that reviews the tests")
    verb.add_argument(
        "--judge-pause",
        type=float,
        default=PAUSE_SECONDS,
        help="seconds before the judge is asked again (default: %(default)g)",
    )
    verb.set_defaults(call=_validate)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {text}")
    return number


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    for kind in kinds:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r} is no kind of variation; choose from: {', '.join(KINDS)}")
    return kinds


def _validate(given: argparse.Namespace) -> int:
    loaded = load_sources(given.tasks)
    if given.kinds and not given.augment:
        raise UserError(f"--kinds {','.join(given.kinds)} goes with --augment; add it")
    plan = ValidationPlan(
        tasks=loaded.mix.tasks,
        repeat=given.repeat,
        concurrency=given.concurrency,
        judge=judge_at(given.judge, given.judge_model, given.judge_key_file, given.judge_pause),
        augmented=given.augment,
        augment=of_run(given.kinds),
    )
    directory = RunDir(given.out or Path("runs") / f"validate-{Path(given.tasks[0]).stem}")
    choice = choose(given.sandbox, plan.tasks)
    make_console().print(str(choice), highlight=False)
    sandboxes = SandboxMaker(backend=Backend(kind=choice.kind, image=given.image))()
    with directory.locked():
        remove_leftovers()  # sandboxes that a killed command left running
        results = ValidationResults(directory.path)
        findings = asyncio.run(_interruptible(sandboxes, plan, results))
        results.close(plan.tasks, findings, loaded.refused)
    _show(findings, loaded.refused, results)
    return 0


async def _interruptible(sandboxes: Sandboxes, plan: ValidationPlan, results: ValidationResults) -> list[Finding]:
    """Run the trials. The first SIGTERM or Ctrl-C ends them cleanly; further ones are ignored."""
    work = asyncio.create_task(prove(sandboxes, plan, results))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: work.cancelling() or work.cancel())
    try:
        return await work
    finally:
        await sandboxes.close()


def _show(findings: Sequence[Finding], refused: Sequence[str], results: ValidationResults) -> None:
    console = make_console()
    for reason in refused:
        console.print(f"left out: {reason}", highlight=False, markup=False)
    counts = Counter(finding.verdict for finding in findings)
    for finding in findings:
        if finding.verdict != "accepted":
            console.print(f"{finding.id}: {finding.verdict}: {finding.cause}", highlight=False, markup=False)
    for line in filter(None, on_places(findings)):
        console.print(line.replace("## ", ""), highlight=False, markup=False)
    console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]))
    console.print(f"accepted tasks: {results.accepted}; report: {results.summary}", highlight=False)
