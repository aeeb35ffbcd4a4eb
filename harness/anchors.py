"""Where the rollouts of a group begin: which recorded success they replay, and how many of its turns.

IPA's chunk-initialised resampling (arXiv 2512.24873, section 3.2) names two ways to choose this anchor:

- rollback: from the last turn backwards, until success drops. The turn where it does is the crucial one: the turns
  before it are replayed, and the policy is trained from there on, until success is no longer lower than behind the
  turn. Then the anchor goes back by another one.
- parallel: any anchor, with equal chances, for each group its own.

Both are functions of what the pool holds, so a resumed run goes on as it would have. Left out: the replay itself
(proxy/replay).
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from proxy.pool.database import Pool
from proxy.pool.rollouts.groups import GroupOptions
from proxy.pool.rollouts.queue import PlannedGroup, opened
from proxy.pool.rollouts.starts import RecordedSuccess, Start, outcomes, successes

Way = Literal["rollback", "parallel"]
SAMPLES = 8
"""Rollouts from an anchor before its success counts: the newest ones."""
DROP = 0.3
"""A turn is crucial if success falls by at least this much when the turn is sampled too, instead of replayed. The paper
names no test; with 8 rollouts, a smaller difference is mostly chance."""


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """How a run chooses the recorded successes that its groups begin with."""

    run: str
    """Name of the run in the pool that recorded them. It may be the same run."""
    way: Way
    seed: int

    def begin(self, pool: Pool, run_id: int, group: PlannedGroup) -> GroupOptions:
        """The options of a group that is opened now, with its start.

        It has none where there is no recorded success of its task and agent, where a task varies its environment or
        has several steps, and for evaluation.
        """
        options = group.options
        if options.held_out or group.task.get("augment") or group.task.get("steps"):
            return options
        found = successes(pool, self.run, group.task["id"], options.agent)
        if not found:
            return options
        if self.way == "parallel":
            chance = random.Random(f"{self.seed} {opened(pool, run_id)}")
            chosen = chance.choice(found)
            return replace(options, start=Start(chosen.attempt_id, chance.randrange(chosen.turns), chosen.dated_at))
        start = first_unfinished(found, outcomes(pool, run_id, [one.attempt_id for one in found]))
        return replace(options, start=start)


def first_unfinished(
    found: Sequence[RecordedSuccess], seen: Mapping[int, Mapping[int, Sequence[bool]]]
) -> Start | None:
    """The anchor of the first recorded success whose rollback has not come to its beginning; None: all have.

    `seen`: recorded attempt -> replayed turns -> whether the rollouts from there succeeded, oldest first.
    """
    for one in found:
        turns = rollback(one.turns, seen.get(one.attempt_id, {}))
        if turns is not None:
            return Start(one.attempt_id, turns, one.dated_at)
    return None


def rollback(turns: int, seen: Mapping[int, Sequence[bool]]) -> int | None:
    """How many of `turns` recorded turns are replayed next; None: success has not dropped back to the very beginning.

    Behind the last turn success is 1: that is the recorded one.
    """
    behind = 1.0
    for anchor in range(turns - 1, -1, -1):
        newest = seen.get(anchor, ())[-SAMPLES:]
        if len(newest) < SAMPLES or behind - fmean(newest) >= DROP:
            return anchor
        behind = fmean(newest)
    return None
