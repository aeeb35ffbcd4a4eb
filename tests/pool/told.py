"""Progress whose lines a test can count on."""

import threading
from collections import defaultdict

import pytest

from proxy.pool.terminal import progress


def tell_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first unit of each work wait until a line tells of it: all may take less time than a thread to be
    scheduled."""
    advance, line = progress._Lines.advance, progress._Lines.line
    told = defaultdict[progress._Lines, threading.Event](threading.Event)

    def advancing(lines: progress._Lines, units: float) -> None:
        advance(lines, units)
        assert told[lines].wait(60)

    def telling(lines: progress._Lines, seconds: float) -> str:
        if lines._done:
            told[lines].set()
        return line(lines, seconds)

    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.001)
    monkeypatch.setattr(progress._Lines, "advance", advancing)
    monkeypatch.setattr(progress._Lines, "line", telling)
