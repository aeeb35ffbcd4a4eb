"""Whether a replica gets calls: a circuit breaker, as a state machine without clock or network.

closed: the replica gets its share. open: it gets none, and its health is checked after pauses that double. half-open:
it answers again and gets one call, which closes or reopens the circuit. Left out: the health checks (fleet.py).
"""

from dataclasses import dataclass

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""Seconds between the health checks of an open replica: the first pause, and the longest."""
FAILURES = 3
"""Consecutive failures after which a replica that still answers gets no more calls."""
LOST = ("unreachable", "died", "silent")
"""Kinds of EngineError that open the circuit at once."""
REPLICA = (*LOST, "failed")
"""Kinds of EngineError that are the replica's fault rather than the request's."""
ELSEWHERE = (*REPLICA, "busy")
"""Kinds of EngineError after which another replica may succeed."""


@dataclass
class Circuit:
    """The circuit of one replica."""

    state: str = "closed"
    """closed | half-open | open."""
    trying: bool = False
    """Whether the one call of a half-open circuit is in flight."""
    _failures: int = 0
    _pause: float = FIRST_PAUSE

    def admits(self) -> bool:
        """Whether a call may go there now."""
        return self.state == "closed" or (self.state == "half-open" and not self.trying)

    def begun(self) -> None:
        """Note that a call is sent there."""
        self.trying = self.state == "half-open"

    def sampled(self) -> None:
        """Note the first tokens of a call: they close the circuit, but the next failure opens it again."""
        if self.state != "closed":
            self.state, self.trying, self._failures = "closed", False, FAILURES - 1

    def served(self) -> None:
        """Note a call that was sampled to its end."""
        self.state, self.trying, self._failures, self._pause = "closed", False, 0, FIRST_PAUSE

    def left(self) -> None:
        """Note a call that proves nothing: its client left, or its request was refused."""
        self.trying = False

    def failed(self, kind: str) -> None:
        """Note that a call or a health check failed."""
        self._failures += 1
        if self.state == "half-open" or kind in LOST or self._failures >= FAILURES:
            self.state, self.trying, self._failures = "open", False, 0

    def answered(self) -> None:
        """Note that an open replica answers its health check again."""
        if self.state == "open":
            self.state, self.trying = "half-open", False

    def pause(self) -> float:
        """Seconds until an open replica is checked again; longer each time."""
        now, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return now
