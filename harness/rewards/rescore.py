"""Scores the recorded rollouts of a run again, without running an agent, and compares old and new rewards."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean

from harness.async_pool import AsyncPool
from harness.rewards.scorer import RolloutFacts, Score, Scorer, scored
from proxy.pool.completions.store import labelled
from proxy.pool.completions.store import of_attempt as completions_of
from proxy.pool.rollouts.scoring import NewScore, Scorable
from proxy.pool.terminal.progress import Advance, progress

AT_ONCE = 32
"""Rollouts that are in memory together."""


@dataclass(frozen=True)
class Rescored:
    """A rollout and what the scorer says now."""

    row: Scorable
    score: Score

    @property
    def old(self) -> float | None:
        return self.row.current

    @property
    def new(self) -> float | None:
        return self.score.verdict.reward if self.score.verdict else None

    @property
    def change(self) -> float:
        """How far the new reward is from the old one; 0 where one is missing."""
        return 0.0 if self.old is None or self.new is None else self.new - self.old

    def to_pool(self) -> NewScore:
        verdict = self.score.verdict
        if verdict is None:
            return NewScore(reward=None, parts={}, why=self.score.why)
        return NewScore(reward=verdict.reward, parts=dict(verdict.parts))


async def rescore(pool: AsyncPool, scorer: Scorer, rows: Sequence[Scorable]) -> list[Rescored]:
    """Score these rollouts, in their order. Shows its progress."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(row: Scorable, advance: Advance) -> Rescored:
        async with places:
            chain = labelled(await pool(completions_of, row.attempt_id))
            rescored = Rescored(row, await scored(scorer, RolloutFacts(row, chain)))
            advance(1)
            return rescored

    try:
        with progress("scoring", len(rows), "rollouts") as advance:
            return list(await asyncio.gather(*(one(row, advance) for row in rows)))
    finally:
        await scorer.close()


@dataclass(frozen=True)
class RewardComparison:
    """Old and new rewards of some rollouts."""

    name: str
    rollouts: int
    old: float | None
    """Mean of the old rewards; None: there are none."""
    new: float | None
    missing: int
    """Rollouts without a new reward."""
    correlation: float | None
    """Pearson's, over the rollouts with both; None: fewer than two, or one of them does not vary."""


def compared(rescored: Sequence[Rescored]) -> list[RewardComparison]:
    """Compare old and new rewards by task, and at last over all."""
    tasks: dict[str, list[Rescored]] = {}
    for one in rescored:
        tasks.setdefault(str(one.row.task.get("id", "?")), []).append(one)
    return [_comparison(name, some) for name, some in sorted(tasks.items())] + [_comparison("all", rescored)]


def _comparison(name: str, some: Sequence[Rescored]) -> RewardComparison:
    old = [one.old for one in some if one.old is not None]
    new = [one.new for one in some if one.new is not None]
    both = [(one.old, one.new) for one in some if one.old is not None and one.new is not None]
    try:
        together = correlation(*map(list, zip(*both, strict=True))) if len(both) > 1 else None
    except StatisticsError:  # one of them does not vary
        together = None
    return RewardComparison(name, len(some), _mean(old), _mean(new), len(some) - len(new), together)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def largest_changes(rescored: Sequence[Rescored], most: int) -> list[Rescored]:
    """Return the rollouts whose rewards change the most."""
    changed = [one for one in rescored if one.change]
    return sorted(changed, key=lambda one: (-abs(one.change), one.row.rollout_id))[:most]


def reasons(rescored: Sequence[Rescored]) -> Iterator[tuple[str, int]]:
    """Yield why rollouts have no new reward, the most frequent reason first."""
    yield from Counter(one.score.why for one in rescored if one.new is None).most_common()
