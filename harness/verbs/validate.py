"""`harness validate`: prove tasks before they are trusted. The same command goes on where it was stopped."""

import argparse
import asyncio
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness.judge import PAUSE_SECONDS, Judge
from harness.progress import make_console
from harness.proof import Book, Plan, prove
from harness.rundir import RunDir
from harness.tasks.sources import load_sources
from harness.validate import VERDICTS, Finding
from proxy.pool.errors import UserError
from sandboxes.process import ProcessSandboxes
from sandboxes.reaping import reap


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("validate", help="prove tasks: the oracle solution passes, doing nothing does not")
    verb.add_argument("tasks", nargs="+", metavar="SOURCE", help="as for `harness run`")
    verb.add_argument("--out", type=Path, metavar="DIR", help="for report and accepted tasks (runs/validate-<tasks>)")
    verb.add_argument("--repeat", type=_count, default=2, help="trials of each kind, to find flaky tasks (%(default)s)")
    verb.add_argument("--concurrency", type=_count, default=4, help="trials at a time (%(default)s)")
    verb.add_argument("--judge", metavar="URL", help="OpenAI-compatible endpoint, ending in /v1, to review the tests")
    verb.add_argument("--judge-model", metavar="NAME", help="the model there")
    verb.add_argument("--judge-key-file", type=Path, metavar="FILE", help="its API key, if it wants one")
    verb.add_argument("--judge-pause", type=float, default=PAUSE_SECONDS, help="seconds before it is asked again")
    verb.set_defaults(call=_validate)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {text}")
    return number


def _validate(given: argparse.Namespace) -> int:
    loaded = load_sources(given.tasks)
    plan = Plan(tasks=loaded.mix.tasks, repeat=given.repeat, concurrency=given.concurrency, judge=_judge_of(given))
    directory = RunDir(given.out or Path("runs") / f"validate-{Path(given.tasks[0]).stem}")
    with directory.held():
        reap()  # what a killed command left at work
        book = Book(directory.path)
        findings = asyncio.run(_interruptible(plan, book))
        book.close(plan.tasks, findings, loaded.refused)
    _show(findings, loaded.refused, book)
    return 0


def _judge_of(given: argparse.Namespace) -> Judge | None:
    if given.judge is None:
        if given.judge_model or given.judge_key_file:
            raise UserError("--judge-model and --judge-key-file go with --judge URL; name the endpoint")
        return None
    if not given.judge_model:
        raise UserError(f"--judge {given.judge} needs the name of a model; give it with --judge-model")
    if not given.judge.startswith(("http://", "https://")):
        raise UserError(f"--judge must be a URL that begins with http:// or https://: {given.judge}")
    try:
        key = given.judge_key_file.read_text(encoding="ascii").strip() if given.judge_key_file else ""
    except (OSError, ValueError) as error:
        raise UserError(f"the judge's key cannot be read ({error}); correct --judge-key-file") from error
    return Judge(given.judge, given.judge_model, key, given.judge_pause)


async def _interruptible(plan: Plan, book: Book) -> list[Finding]:
    """The first SIGTERM or Ctrl-C ends the trials at work cleanly; further ones change nothing."""
    work = asyncio.create_task(prove(ProcessSandboxes(), plan, book))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: work.cancelling() or work.cancel())
    return await work


def _show(findings: Sequence[Finding], refused: Sequence[str], book: Book) -> None:
    console = make_console()
    for reason in refused:
        console.print(f"left out: {reason}", highlight=False, markup=False)
    counts = Counter(found.verdict for found in findings)
    for found in findings:
        if found.verdict != "accepted":
            console.print(f"{found.id}: {found.verdict}: {found.cause}", highlight=False, markup=False)
    console.print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]))
    console.print(f"accepted tasks: {book.accepted}; report: {book.summary}", highlight=False)
