"""Progress of what one waits for: a bar on a terminal, elsewhere a line every PLAIN_SECONDS. Both on stderr.

Work that is done before the first line would be due is silent, except on a terminal, where the bar then goes away.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

PLAIN_SECONDS = 10.0
Advance = Callable[[int], None]


@contextmanager
def progress(what: str, total: int | None = None, unit: str = "") -> Iterator[Advance]:
    """Show how far the block is, which calls what it is given with the number of units that it has done since.

    Without a unit it shows only how long the block has taken; without a total no rest time.
    """
    if sys.stderr.isatty():
        with _bar(what, total, unit) as advance:
            yield advance
        return
    lines = _Lines(what, total, unit)
    ended = threading.Event()
    thread = threading.Thread(target=lines.until, args=(ended,), daemon=True)
    thread.start()
    try:
        yield lines.advance
    finally:
        ended.set()
        thread.join()


class _Lines:
    """The plain form. A thread prints, so that a line comes also where nothing advances."""

    def __init__(self, what: str, total: int | None, unit: str):
        self._what, self._total, self._unit = what, total, unit
        self._done = 0
        self._began = time.monotonic()

    def advance(self, units: int) -> None:
        self._done += units

    def until(self, ended: threading.Event) -> None:
        while not ended.wait(PLAIN_SECONDS):
            print(self.line(time.monotonic() - self._began), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """What is printed after so many seconds."""
        if not self._unit:
            return f"{self._what}: {seconds:.0f} s"
        rate = self._done / seconds
        of = "" if self._total is None else f" of {self._total}"
        parts = [f"{self._what}: {self._done}{of} {self._unit}", f"{rate:.3g}/s"]
        if self._total is not None and rate:
            parts.append(f"{max(self._total - self._done, 0) / rate:.0f} s left")
        return ", ".join(parts)


class _Rate(ProgressColumn):
    """Units per second since the beginning."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / task.elapsed:.3g}/s" if task.elapsed else "")


@contextmanager
def _bar(what: str, total: int | None, unit: str) -> Iterator[Advance]:
    columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    if unit:
        columns += [BarColumn(), MofNCompleteColumn(), TextColumn(unit), _Rate(), TimeRemainingColumn()]
    else:
        columns.append(TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda units: shown.advance(task, units)
