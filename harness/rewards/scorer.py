"""What gives a rollout its reward after its verifier: the facts that it gets, and its answer.

A scorer is a user's function (function.py) or a set of judges (judges.py). It runs in the harness, on what the pool
holds. Where it comes to no score, the reward is missing, never the verifier's and never 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import msgspec

from harness.failure import AttemptFailed, stage
from harness.rewards.trajectory import TrajectoryTurn, plain, trajectory
from harness.verdict.rewards import Verdict
from proxy.pool.behaviour.read import events
from proxy.pool.completions.records import Completion
from proxy.pool.rollouts.scoring import UNSCORED, Scorable

VERIFIER = "verifier"
"""The part of a reward that holds the verifier's."""


@dataclass(frozen=True)
class RolloutFacts:
    """A rollout, as scorers see it."""

    row: Scorable
    chain: Sequence[Completion]
    """The completions of its final attempt, in commit order, with their labels."""

    @property
    def task(self) -> Mapping[str, Any]:
        return self.row.task

    @cached_property
    def verdict(self) -> Verdict | None:
        """The verifier's verdict; None: there is none."""
        if self.row.reward is None:
            return None
        parts = {name: value for name, value in self.row.parts.items() if name != VERIFIER}
        return Verdict(self.row.parts.get(VERIFIER, self.row.reward), parts)

    @cached_property
    def turns(self) -> list[TrajectoryTurn]:
        return trajectory(self.chain)

    def verdict_data(self) -> dict[str, Any]:
        """The verdict as plain data: `reward` is None where there is none, and `why` says why."""
        verdict = self.verdict
        return {
            "reward": verdict.reward if verdict else None,
            "parts": dict(verdict.parts) if verdict else {},
            "failure": self.row.failure,
            "why": self.row.detail if verdict is None else "",
        }

    def rollout_data(self) -> dict[str, Any]:
        """The rollout as plain data (docs/rewards.md lists it)."""
        return {
            "rollout": self.row.rollout_id,
            "attempt": self.row.attempt_id,
            "group": self.row.queue_index,
            "member": self.row.member,
            "agent": self.row.agent,
            "exit_code": self.row.exit_code,
            "timings": dict(self.row.timings),
            "turns": plain(self.turns),
            "events": [msgspec.to_builtins(event) for event in events(self.chain)],
        }


@dataclass(frozen=True)
class Score:
    """What a scorer says."""

    verdict: Verdict | None
    """The reward and its parts. None: it came to none."""
    why: str = ""
    """Why it came to none, in one sentence."""


class Scorer(Protocol):
    """Gives rollouts their rewards."""

    name: str
    """Names it in the pool and in messages."""

    async def score(self, facts: RolloutFacts) -> Score:
        """Score one rollout. It raises nothing for a rollout that it cannot score."""

    async def close(self) -> None:
        """End what it has started."""


async def scored(scorer: Scorer, facts: RolloutFacts) -> Score:
    """Score one rollout. Where the scorer raises all the same, the reward of this rollout is missing."""
    try:
        with stage(UNSCORED):
            return await scorer.score(facts)
    except AttemptFailed as failed:
        return Score(None, f"{scorer.name} failed ({failed.detail})")
