"""What is pulled or built on a daemon: shown to whoever waits for it."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

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


class PulledLayers:
    """How much of an image's layers is downloaded, from what a daemon says of a pull."""

    def __init__(self) -> None:
        self._layers: dict[str, tuple[int, int]] = {}
        """Id of a layer -> bytes that are here, and all of its bytes."""
        self._began = time.monotonic()

    def after(self, said: Mapping[str, Any]) -> str:
        """Return the megabytes, and the rest time, after the daemon said this; empty while no size is known.

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
        left = (time.monotonic() - self._began) * (all_of_it - here) / here
        return f"{here / 1e6:.0f} of {all_of_it / 1e6:.0f} MB, {left:.0f} s left"


class ImageWork:
    """The pulls and builds that go on. `say` is called with a line for each, and for each of their steps."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._now: list[_Work] = []

    @contextmanager
    def on(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show the block as work that goes on. The block calls what it is given with the line of each step.

        An empty line, and the same one again, change nothing.
        """
        work = _Work(what)
        self._now.append(work)
        self._say(what)

        def step(line: str) -> None:
            if line not in ("", work.step):
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
