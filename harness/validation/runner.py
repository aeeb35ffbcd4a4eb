"""Runs the trials of many tasks at once and stores the results, so that a repeated command goes on from there.

trials.jsonl and opinions.jsonl grow with each result; accepted.jsonl (a task file), report.jsonl and report.md are
written at the end. When the command is repeated, trials whose environment failed are run again, and judges that had no
opinion are asked again. A task that was changed counts as a new task.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from harness.environment.augment import every
from harness.tasks import Task
from harness.tasks.verdict_options import Augment
from harness.validation.review import KINDS, PLACES, VERDICTS, Finding, finding, key_of, why_untried
from harness.validation.trials import Kind, Trial, TrialSpec, Where, run_trial
from harness.verdict.judge import Judge, Opinion, opinion
from proxy.pool.errors import UserError
from proxy.pool.files import write_whole
from proxy.pool.terminal.progress import progress
from sandboxes.base import Sandboxes

Row = TypeVar("Row", bound=msgspec.Struct)


class Reviewed(msgspec.Struct, frozen=True, kw_only=True):
    """One line of opinions.jsonl."""

    task: str
    judge: str
    opinion: Opinion


class ValidationResults:
    """The results of a validation, stored in a directory."""

    def __init__(self, directory: Path):
        self.accepted, self.report = directory / "accepted.jsonl", directory / "report.jsonl"
        self.summary = directory / "report.md"
        self._trials, self._opinions = directory / "trials.jsonl", directory / "opinions.jsonl"
        rows = _rows(self._trials, Trial)
        self.trials = {name_of(row): row for row in rows if row.failure != "environment"}
        reviewed = _rows(self._opinions, Reviewed)
        self.opinions = {(row.task, row.judge): row.opinion for row in reviewed if row.opinion.weak is not None}

    def add(self, trial: Trial) -> None:
        self.trials[name_of(trial)] = trial
        _append(self._trials, trial)

    def add_opinion(self, task: str, judge: str, opinion: Opinion) -> None:
        self.opinions[task, judge] = opinion
        _append(self._opinions, Reviewed(task=task, judge=judge, opinion=opinion))

    def close(self, tasks: Sequence[Task], findings: Sequence[Finding], refused: Sequence[str] = ()) -> None:
        """Write the accepted tasks, and a report on all of them."""
        accepted = {finding.id for finding in findings if finding.verdict == "accepted"}
        write_whole(self.accepted, _lines(task for task in tasks if task.id in accepted))
        write_whole(self.report, _lines(findings))
        write_whole(self.summary, summary(findings, refused).encode())


@dataclass(frozen=True, kw_only=True)
class ValidationPlan:
    """Which tasks to try, and how."""

    tasks: Sequence[Task]
    repeat: int
    """Trials of each kind per task."""
    concurrency: int
    judge: Judge | None = None
    augmented: bool = False
    """Also try the oracle under each variation of the environment that the task or `augment` declares."""
    augment: Augment | None = None
    """Variations for tasks that declare none."""


async def prove(sandboxes: Sandboxes, plan: ValidationPlan, results: ValidationResults) -> list[Finding]:
    """Try each task and return a finding for each, in order. Trials whose results are stored are not run again.

    Shows its progress, and which image is built or pulled for it.
    """
    proof = _Proof(sandboxes, plan, results, asyncio.Semaphore(plan.concurrency))
    with progress(lambda: ", ".join(filter(None, ("validating", sandboxes.making))), len(plan.tasks), "tasks") as done:

        async def tried(task: Task) -> Finding:
            found = await proof.of(task)
            done(1)
            return found

        async with asyncio.TaskGroup() as group:
            proofs = [group.create_task(tried(task)) for task in plan.tasks]
    return [one.result() for one in proofs]


@dataclass(frozen=True)
class _Proof:
    sandboxes: Sandboxes
    plan: ValidationPlan
    results: ValidationResults
    slots: asyncio.Semaphore

    async def of(self, task: Task) -> Finding:
        key = key_of(task)
        if why_untried(task):
            return finding(task, [], self.sandboxes.kind)
        specs = [TrialSpec(task, key, kind, number) for kind in KINDS for number in range(self.plan.repeat)]
        if self.plan.augmented:
            specs += [TrialSpec(task, key, "oracle", 0, one) for one in every(task.augment or self.plan.augment)]
        trials = list(await asyncio.gather(*map(self._trial, specs)))
        result = finding(task, trials, self.sandboxes.kind)
        if any(reward is not None for reward in result.oracle):
            specs = [TrialSpec(task, key, "hollow", 0)]
            if self.sandboxes.kind != "process":  # a process sandbox hides nothing from the agent, fresh or shared
                other: Where = "shared" if result.where == "fresh" else "fresh"
                specs += [TrialSpec(task, key, kind, 0, where=other) for kind in KINDS]
            trials += await asyncio.gather(*map(self._trial, specs))
            result = finding(task, trials, self.sandboxes.kind)
        if result.verdict != "accepted" or self.plan.judge is None:
            return result
        return finding(task, trials, self.sandboxes.kind, await self._opinion(self.plan.judge, task, key))

    async def _trial(self, spec: TrialSpec) -> Trial:
        if (done := self.results.trials.get(spec.name)) is not None:
            return done
        async with self.slots:
            trial = await run_trial(self.sandboxes, spec)
        self.results.add(trial)
        return trial

    async def _opinion(self, judge: Judge, task: Task, key: str) -> Opinion:
        if (stored := self.results.opinions.get((key, judge.model))) is not None:
            return stored
        async with self.slots:
            new = await opinion(judge, task)
        self.results.add_opinion(key, judge.model, new)
        return new


def name_of(trial: Trial) -> tuple[str, Kind, int, str, str]:
    return trial.task, trial.kind, trial.number, trial.variation, trial.where


def summary(findings: Sequence[Finding], refused: Sequence[str]) -> str:
    """The report as Markdown: how many tasks got each verdict, and the cause for each that was not accepted."""
    counts = Counter(finding.verdict for finding in findings)
    lines = [f"# {counts['accepted']} of {len(findings)} tasks accepted", "", "| verdict | tasks |", "| --- | --- |"]
    lines += [f"| {verdict} | {counts[verdict]} |" for verdict in VERDICTS if counts[verdict]]
    for verdict in VERDICTS:
        rest = [row for row in findings if row.verdict == verdict and (verdict != "accepted" or row.cause)]
        if rest:
            lines += ["", f"## {verdict}", "", *(f"- `{row.id}`: {' '.join(row.cause.split())}" for row in rest)]
    lines += on_places(findings)
    if refused:
        lines += ["", "## left out", "", *(f"- {reason}" for reason in refused)]
    return "\n".join(lines) + "\n"


def on_places(findings: Sequence[Finding]) -> list[str]:
    """Say which tasks could be verified elsewhere, and what an agent can do to the verdicts of the others."""
    lines: list[str] = []
    for place, heading in PLACES.items():
        names = [f"- `{row.id}`" for row in findings if row.place == place]
        lines += ["", f"## {heading}", "", *names] if names else []
    kinds = dict.fromkeys(sentence for row in findings for sentence in row.not_stopped)
    if kinds:
        lines += ["", "## What an agent can do to a verdict that is reached in its own sandbox", ""]
        lines += [f"- {kind} ({sum(kind in row.not_stopped for row in findings)} tasks)" for kind in kinds]
    bought = [f"- `{row.id}`: {', '.join(row.bought_by)}" for row in findings if row.bought_by]
    if bought:
        lines += ["", "## Code without work earns the whole reward: tested code could write it, or end the tests", ""]
    return lines + bought


def _rows(file: Path, kind: type[Row]) -> list[Row]:
    """Read a file that is appended to, and drop a last line that a crash cut short."""
    if not file.exists():
        return []
    lines = file.read_bytes().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    if len(whole) < len(lines):
        write_whole(file, b"".join(whole))
    try:
        return [msgspec.json.decode(line, type=kind) for line in whole]
    except msgspec.DecodeError as error:
        raise UserError(
            f"{file} was not written by this version ({error}); name another directory with --out"
        ) from error


def _append(file: Path, row: msgspec.Struct) -> None:
    with file.open("ab") as opened:
        opened.write(msgspec.json.encode(row) + b"\n")


def _lines(rows: Iterable[msgspec.Struct]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
