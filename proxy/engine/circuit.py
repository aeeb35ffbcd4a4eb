"""Whether a replica is given calls: a circuit breaker as a state machine that is told what happened.

closed: it gets its share. open: it gets none, and is asked for its health after a pause that doubles. half-open: it
answers again and gets one call; that call closes the circuit or opens it anew. Left out: the asking (fleet.py).
"""

from dataclasses import dataclass

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
FAILURES = 3
"""Failures in a row after which a replica that still answers gets no more calls."""
LOST = ("unreachable", "died", "silent")
"""Kinds of EngineError that open the circuit at once."""
REPLICA = (*LOST, "failed")
"""Kinds of EngineError that speak against the replica rather than the request."""
ELSEWHERE = (*REPLICA, "busy")
"""Kinds of EngineError where another replica may do better."""


@dataclass
class Circuit:
    """The state of one replica."""

    state: str = "closed"
    """closed | half-open | open."""
    trying: bool = False
    """The one call of a half-open circuit is out."""
    _failures: int = 0
    _pause: float = FIRST_PAUSE

    def admits(self) -> bool:
        """Whether a call may go there now."""
        return self.state == "closed" or (self.state == "half-open" and not self.trying)

    def begun(self) -> None:
        """A call is on its way."""
        self.trying = self.state == "half-open"

    def sampled(self) -> None:
        """The first tokens of a call have come. One failure from now on opens a circuit anew that was not closed."""
        if self.state != "closed":
            self.state, self.trying, self._failures = "closed", False, FAILURES - 1

    def served(self) -> None:
        """A call was sampled to its end."""
        self.state, self.trying, self._failures, self._pause = "closed", False, 0, FIRST_PAUSE

    def left(self) -> None:
        """A call ended that says nothing, because its client went away or its request was refused."""
        self.trying = False

    def failed(self, kind: str) -> None:
        """A call or a health check failed."""
        self._failures += 1
        if self.state == "half-open" or kind in LOST or self._failures >= FAILURES:
            self._open()

    def answered(self) -> None:
        """An open replica is healthy again."""
        if self.state == "open":
            self.state, self.trying = "half-open", False

    def pause(self) -> float:
        """Seconds until an open replica is asked again; longer each time."""
        now, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return now

    def _open(self) -> None:
        self.state, self.trying, self._failures = "open", False, 0
