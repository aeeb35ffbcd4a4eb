"""Progress of what one waits for: a bar on a terminal, elsewhere a line every PLAIN_SECONDS. Both on stderr.

Work that is done before the first line would be due is silent, except on a terminal, where the bar then goes away.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

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
MEGABYTE = 1_000_000
"""Bytes of the unit MB."""
Advance = Callable[[float], None]
What = str | Callable[[], str]
"""What goes on; a function where that changes meanwhile."""


def unseen(units: float) -> None:
    """Advance nothing, where nobody watches."""


@contextmanager
def progress(what: What, total: float | None = None, unit: str = "") -> Iterator[Advance]:
    """Show how far the block is, which calls what it is given with the number of units that it has done since.

    Any thread may call it. Without a unit it shows only how long the block has taken; without a total no rest time.
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

    def __init__(self, what: What, total: float | None, unit: str):
        self._what, self._total, self._unit = what, total, unit
        self._done = 0.0
        self._adding = threading.Lock()  # several threads may advance
        self._began = time.monotonic()

    def advance(self, units: float) -> None:
        with self._adding:
            self._done += units

    def until(self, ended: threading.Event) -> None:
        while not ended.wait(PLAIN_SECONDS):
            print(self.line(time.monotonic() - self._began), file=sys.stderr, flush=True)

    def line(self, seconds: float) -> str:
        """What is printed after so many seconds."""
        what = _text(self._what)
        if not self._unit:
            return f"{what}: {seconds:.0f} s"
        of = "" if self._total is None else f" of {self._total:.0f}"
        parts = [f"{what}: {self._done:.0f}{of} {self._unit}", pace(self._done, self._total, seconds)]
        return ", ".join(filter(None, parts))


def pace(done: float, total: float | None, seconds: float) -> str:
    """Say the rate of what was done in so many seconds, and the rest time where the total is known."""
    if not done or not seconds:
        return ""
    rate = done / seconds
    rest = "" if total is None else f", {max(total - done, 0) / rate:.0f} s left"
    return f"{rate:.3g}/s{rest}"


def _text(what: What) -> str:
    return what if isinstance(what, str) else what()


class _Now(ProgressColumn):
    """What goes on at this moment."""

    def __init__(self, what: What):
        super().__init__()
        self._what = what

    def render(self, task: Task) -> Text:
        return Text(_text(self._what))


class _Rate(ProgressColumn):
    """Units per second since the beginning."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / task.elapsed:.3g}/s" if task.elapsed else "")


@cache
def _console() -> Console:
    """One for all: bars that are shown at once share the terminal's last lines only on the same console."""
    return Console(stderr=True)


@contextmanager
def _bar(what: What, total: float | None, unit: str) -> Iterator[Advance]:
    columns: list[ProgressColumn] = [SpinnerColumn(), _Now(what)]
    if unit:
        columns += [BarColumn(), MofNCompleteColumn(), TextColumn(unit), _Rate(), TimeRemainingColumn()]
    else:
        columns.append(TimeElapsedColumn())
    # What is printed meanwhile goes above the bar, but never to stderr in place of a file.
    redirected = sys.stdout.isatty()
    with Progress(*columns, console=_console(), transient=True, redirect_stdout=redirected) as shown:
        task = shown.add_task("", total=total)
        yield lambda units: shown.advance(task, units)
