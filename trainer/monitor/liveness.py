"""Phases of a step that take far longer than before: told while they last, and a figure of the step when it ends."""

import threading
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from proxy.pool.training.steps import PHASES
from trainer.monitor.figures import FEWEST_STEPS

SLOW_SECONDS = 1800.0
"""A phase that is shorter is not slow, however short it was before."""
SLOW_FACTOR = 6.0
"""How many times its median a slow phase takes."""


def medians(before: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each phase over earlier steps' metrics; a phase of too few steps has none."""
    taken = {phase: [step["seconds"][phase] for step in before if phase in step.get("seconds", {})] for phase in PHASES}
    return {phase: median(values) for phase, values in taken.items() if len(values) >= FEWEST_STEPS}


def slowest(seconds: Mapping[str, float], before: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the longest phase as a multiple of its median: 0 where none took SLOW_SECONDS; None without medians."""
    usual = medians(before)
    if not usual:
        return None
    slow = [taken / max(usual[phase], 1e-3) for phase, taken in seconds.items()
            if phase in usual and taken >= SLOW_SECONDS]  # fmt: skip
    return max(slow, default=0.0)


class PhaseWatch:
    """Tells of a phase that takes too long while it lasts, from a thread: a phase that hangs tells nothing itself."""

    def __init__(self, before: Sequence[Mapping[str, Any]], tell: Callable[[str], None]):
        self._limits = {phase: max(SLOW_SECONDS, SLOW_FACTOR * usual) for phase, usual in medians(before).items()}
        self._tell = tell
        self._timer: threading.Timer | None = None

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        self.end()
        if phase in self._limits:
            limit = self._limits[phase]
            text = f"the phase `{phase}` has taken {limit:.0f} s, {SLOW_FACTOR:g} times its median or more"
            self._timer = threading.Timer(limit, self._tell, [text])
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """End the phase."""
        if self._timer is not None:
            self._timer.cancel()
