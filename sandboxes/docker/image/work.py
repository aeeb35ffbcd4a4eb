"""What is pulled or built on a daemon: shown to whoever waits for it."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LONGEST = 80
"""Characters of a step that are shown."""
STEP = re.compile(r"(?:Step |#\d+ \[(?:\S+ )?)(\d+)/(\d+)\b")
"""A line with which a step of a build begins: `Step 3/7 : RUN ...`, or BuildKit's `#8 [3/7] RUN ...`."""
TIMED_STEPS = 2
"""Steps of a build that must be done before its rest time is said."""
Clock = Callable[[], float]
"""Says the seconds."""


@dataclass
class _Work:
    what: str
    began: float
    step: str = ""
    step_began: float = 0.0

    def shown(self, now: float) -> str:
        """Return what goes on, its newest step, and its seconds until now."""
        step = f": {self.step[:LONGEST]}" if self.step else ""
        return f"{self.what}{step} ({self._share(now)}{now - self.began:.0f} s)"

    def _share(self, now: float) -> str:
        """How much of a build is done, counted in steps, and the rest time if the other steps take as long as those."""
        begun = STEP.match(self.step)
        if begun is None:
            return ""
        done, steps = int(begun[1]) - 1, int(begun[2])
        if not 0 < done < steps:
            return ""
        left = (self.step_began - self.began) / done * (steps - done) - (now - self.step_began)
        rest = f"about {left:.0f} s left, " if done >= TIMED_STEPS and left > 0 else ""
        return f"{done / steps:.0%} of its steps, {rest}"


class PulledLayers:
    """How much of an image's layers is downloaded, from what a daemon says of a pull."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._layers: dict[str, tuple[int, int]] = {}
        """Id of a layer -> bytes that are here, and all of its bytes."""
        self._began = clock()

    def after(self, said: Mapping[str, Any]) -> str:
        """Return the megabytes, their rate and the rest time, after the daemon said this; empty while no size is known.

        Layers whose download has not begun are not counted, as nobody knows their sizes.
        """
        layer, status, detail = str(said.get("id")), said.get("status"), said.get("progressDetail") or {}
        if status == "Downloading" and detail.get("total"):
            self._layers[layer] = detail.get("current", 0), detail["total"]
        elif status in ("Download complete", "Pull complete") and layer in self._layers:
            self._layers[layer] = (self._layers[layer][1],) * 2
        here, all_of_it = (sum(sizes) for sizes in zip(*self._layers.values(), strict=True)) if self._layers else (0, 0)
        if not here:
            return ""
        seconds = max(self._clock() - self._began, 1e-6)
        left = seconds * (all_of_it - here) / here
        rate = here / 1e6 / seconds
        return f"{here / 1e6:.0f} of {all_of_it / 1e6:.0f} MB, {rate:.1f} MB/s, {left:.0f} s left"


class ImageWork:
    """The pulls and builds that go on. `say` is called with a line for each, and for each of their steps."""

    def __init__(self, say: Callable[[str], None], clock: Clock = time.monotonic):
        self._say, self._clock = say, clock
        self._now: list[_Work] = []

    @contextmanager
    def on(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show the block as work that goes on. The block calls what it is given with the line of each step.

        An empty line, and the same one again, change nothing.
        """
        work = _Work(what, self._clock())
        self._now.append(work)
        self._say(what)

        def step(line: str) -> None:
            if line not in ("", work.step):
                work.step, work.step_began = line, self._clock()
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
        return f"{self._now[0].shown(self._clock())}{f' and {others} other images' if others else ''}"
