"""What is pulled or built on a daemon: shown to whoever waits for it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LONGEST = 80
"""Characters of a step that are shown."""


@dataclass
class _Work:
    what: str
    step: str = ""
    began: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        step = f": {self.step[:LONGEST]}" if self.step else ""
        return f"{self.what}{step} ({time.monotonic() - self.began:.0f} s)"


class ImageWork:
    """The pulls and builds that go on. `say` is called with a line for each, and for each of their steps."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._now: list[_Work] = []

    @contextmanager
    def on(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show the block as work that goes on. The block calls what it is given with the line of each step."""
        work = _Work(what)
        self._now.append(work)
        self._say(what)

        def step(line: str) -> None:
            work.step = line
            self._say(f"{what}: {line}")

        try:
            yield step
        finally:
            self._now.remove(work)

    def __str__(self) -> str:
        """The oldest work with its newest step and its seconds, and how many others there are; empty without any."""
        if not self._now:
            return ""
        others = len(self._now) - 1
        return f"{self._now[0]}{f' and {others} other images' if others else ''}"
