"""`harness validate`: prove tasks before they are trusted. The same command goes on where it was stopped."""

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
from harness.validation.runner import ValidationPlan, ValidationResults, prove
from harness.verdict.judge import PAUSE_SECONDS, Judge
from proxy.pool.errors import UserError
from sandboxes.base import Sandboxes
from sandboxes.gc import remove_leftovers


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("validate", help="prove tasks: the oracle solution passes, doing nothing does not")
    verb.add_argument("tasks", nargs="+", metavar="SOURCE", help="as for `harness run`")
    verb.add_argument("--out", type=Path, metavar="DIR", help="for report and accepted tasks (runs/validate-<tasks>)")
    verb.add_argument("--repeat", type=_count, default=2, help="trials of each kind, to find flaky tasks (%(default)s)")
    verb.add_argument("--concurrency", type=_count, default=4, help="trials at a time (%(default)s)")
    verb.add_argument("--augment", action="store_true", help="also solve under each variation that a task declares")
    verb.add_argument("--kinds", type=_kinds, default=[], metavar="KIND,...", help="for tasks that declare none")
    verb.add_argument("--sandbox", choices=SANDBOXES, default="auto", help="kind of the sandboxes (%(default)s)")
    verb.add_argument("--image", default=IMAGE, help="of tasks that name none, in Docker (%(default)s)")
    add_judge(verb, "to review the tests")
    verb.add_argument("--judge-pause", type=float, default=PAUSE_SECONDS, help="seconds before it is asked again")
    verb.set_defaults(call=_validate)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {text}")
    return number


def _kinds(text: str) -> list[str]:
    given = text.split(",")
    for kind in given:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r} is no kind of variation; choose from: {', '.join(KINDS)}")
    return given


def _validate(given: argparse.Namespace) -> int:
    loaded = load_sources(given.tasks)
    if given.kinds and not given.augment:
        raise UserError(f"--kinds {','.join(given.kinds)} goes with --augment; add it")
    plan = ValidationPlan(
        tasks=loaded.mix.tasks,
        repeat=given.repeat,
        concurrency=given.concurrency,
        judge=_judge_of(given),
        augmented=given.augment,
        augment=of_run(given.kinds),
    )
    directory = RunDir(given.out or Path("runs") / f"validate-{Path(given.tasks[0]).stem}")
    choice = choose(given.sandbox, plan.tasks)
    make_console().print(str(choice), highlight=False)
    sandboxes = SandboxMaker(backend=Backend(kind=choice.kind, image=given.image))()
    with directory.held():
        remove_leftovers()  # what a killed command left at work
        book = ValidationResults(directory.path)
        findings = asyncio.run(_interruptible(sandboxes, plan, book))
        book.close(plan.tasks, findings, loaded.refused)
    _show(findings, loaded.refused, book)
    return 0


def _judge_of(given: argparse.Namespace) -> Judge | None:
    return judge_at(given.judge, given.judge_model, given.judge_key_file, given.judge_pause)


async def _interruptible(sandboxes: Sandboxes, plan: ValidationPlan, book: ValidationResults) -> list[Finding]:
    """The first SIGTERM or Ctrl-C ends the trials at work cleanly; further ones change nothing."""
    work = asyncio.create_task(prove(sandboxes, plan, book))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: work.cancelling() or work.cancel())
    try:
        return await work
    finally:
        await sandboxes.close()


def _show(findings: Sequence[Finding], refused: Sequence[str], book: ValidationResults) -> None:
    console = make_console()
    for reason in refused:
        console.print(f"left out: {reason}", highlight=False, markup=False)
    counts = Counter(found.verdict for found in findings)
    for found in findings:
        if found.verdict != "accepted":
            console.print(f"{found.id}: {found.verdict}: {found.cause}", highlight=False, markup=False)
    console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]))
    console.print(f"accepted tasks: {book.accepted}; report: {book.summary}", highlight=False)
