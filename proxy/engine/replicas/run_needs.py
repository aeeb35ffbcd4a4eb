"""What the calls of one run need: an engine with weights of that run. While none is up, they wait.

An engine that was restarted, or that serves another run, has foreign weights. What it sampled for the run could not be
trained. Until the run publishes its first weights, none are foreign to it: it begins with whatever engines serve, and
runs that are not trained never publish any. An evaluation of a training run needs what that run needs. Left out: asking
the pool (fleet.py).
"""

import asyncio
import re
import time
from dataclasses import dataclass

from proxy.engine.replicas.outage import Outage

PUBLISHED = re.compile(r"(v\d+)(-\w+)?")
"""The names of published versions, also with what a trainer adds while it is at work on an engine."""
RELEASED = ("-released", "-moving")
"""What it adds while an engine on its own devices has given up its memory. Such an engine takes calls and keeps them
waiting for the whole step."""

UNFINISHED = ("-loading", "-paused")
"""What it adds while it replaces the weights of an engine, and when that has failed. Such an engine is paused."""


@dataclass(frozen=True)
class RunFacts:
    """What the pool says about a run."""

    newest: str = ""
    """Its newest published version; empty before the first."""
    known: frozenset[str] = frozenset()
    """Versions that the run has published and not taken back, among those that were asked about."""
    attended: bool = True
    """Whether a harness works at it."""
    evaluated: str = ""
    """The version that an evaluation evaluates; empty for other runs."""
    engine: str = ""
    """The engine that is held at that version for it; empty: none is."""


class RunNeeds:
    """One run, as a fleet of engines sees it. It has no lock: only one event loop may use it."""

    def __init__(self) -> None:
        self.outage = Outage()
        self.asking = asyncio.Lock()
        """Held while the pool is asked, so that many calls ask once."""
        self.asked_at = -float("inf")
        """When the pool was asked last."""
        self.attended_at = time.monotonic()
        """When a harness was last known to be at work."""
        self._asked: frozenset[str] = frozenset()
        self._facts = RunFacts()

    @property
    def newest(self) -> str:
        return self._facts.newest

    def prefers(self, url: str, version: str) -> bool:
        """Whether calls of the run go to an engine at this URL with this version first, which it evaluates."""
        return version == self._facts.evaluated != "" and self._facts.engine in ("", url)

    def learn(self, asked: frozenset[str], facts: RunFacts | None) -> None:
        """Take note of what the pool said about the run and these versions. None: it did not answer."""
        self._asked, self.asked_at = asked, time.monotonic()
        if facts is None or facts.attended:
            self.attended_at = self.asked_at
        if facts is not None:
            self._facts = facts

    def knows(self, versions: frozenset[str]) -> bool:
        """Whether the pool was asked about these versions."""
        return self._asked >= versions

    def trains(self, version: str) -> bool:
        """Whether an engine that names this version has weights of the run, or is getting them."""
        return not self.newest or published_name(version) in self._facts.known

    def takes(self, version: str) -> bool:
        """Whether an engine that names this version may get calls of the run."""
        suffix = version.removeprefix(published_name(version))
        return not self.newest or (self.trains(version) and suffix in ("", *RELEASED))


def published_name(version: str) -> str:
    """Return the published version of which an engine's version name is made; the name itself if it is of none."""
    matched = PUBLISHED.fullmatch(version)
    return matched[1] if matched else version
