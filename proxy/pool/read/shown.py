"""Rollouts as commands read them: with a bar or lines that say how many are left (proxy/pool/terminal/progress.py)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from proxy.pool.database import Pool
from proxy.pool.read.pages import RolloutFilter, count, rollouts
from proxy.pool.read.records import RolloutRecord
from proxy.pool.terminal.progress import Advance, progress


@contextmanager
def shown(pool: Pool, which: RolloutFilter, what: str) -> Iterator[Iterable[RolloutRecord]]:
    """Give the rollouts that pass, and show how far their reader is."""
    with progress(what, count(pool, which), "rollouts") as advance:
        yield _advancing(rollouts(pool, which), advance)


def _advancing(found: Iterable[RolloutRecord], advance: Advance) -> Iterator[RolloutRecord]:
    for rollout in found:
        yield rollout
        advance(1)
