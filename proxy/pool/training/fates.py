"""Fates: what a train step did with every token of its groups. They are stored with the step that did it.

A rollback retires versions, not fates: a fate counts while its version is not retired, and is replaced when the
completion is trained again. The sums on a step's row stay when the completions leave the pool. Not here: tokens that no
step took (proxy/pool/inspect/account.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from sqlalchemy import Connection, delete, insert

from proxy.pool.completions.store import IDS_PER_QUERY
from proxy.pool.schema import fates as table
from proxy.pool.untrained import Untrained


@dataclass(frozen=True)
class CompletionFate:
    """What a step did with the tokens of a completion's answer."""

    completion_id: int
    trained: int
    """Tokens that taught the model something; several passes over them in one step count once."""
    left_out: Mapping[Untrained, int]
    """All the others, by reason."""


@dataclass(frozen=True)
class RolloutFate:
    """What a step did with a rollout of its groups."""

    group_id: int
    rollout_id: int
    why: Untrained | None
    """Why the rollout is left out as a whole; None: it is not. A rollout without completions may have a reason, too."""
    completions: Sequence[CompletionFate]


@dataclass(frozen=True)
class Tally:
    """Tokens, and how many rollouts and groups they are of. A rollout may stand in several tallies."""

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.groups + other.groups, self.rollouts + other.rollouts, self.tokens + other.tokens)

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(self.groups - other.groups, self.rollouts - other.rollouts, self.tokens - other.tokens)


def added(first: Mapping[str, Tally], second: Mapping[str, Tally]) -> dict[str, Tally]:
    """Add two sums by reason or place."""
    return {name: first.get(name, Tally()) + second.get(name, Tally()) for name in sorted({*first, *second})}


@dataclass(frozen=True)
class StepSums:
    """The fates of a step, summed up."""

    trained: Tally = Tally()
    left_out: dict[str, Tally] = field(default_factory=dict)
    """By reason (proxy/pool/untrained.py: Untrained.heading)."""

    def __add__(self, other: "StepSums") -> "StepSums":
        return StepSums(self.trained + other.trained, added(self.left_out, other.left_out))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Any) -> "StepSums":
        return msgspec.convert(stored, cls)


def sums(rollouts: Iterable[RolloutFate]) -> StepSums:
    """Sum fates up."""
    tokens: dict[str | None, int] = defaultdict(int)
    of_rollouts: dict[str | None, set[int]] = defaultdict(set)
    of_groups: dict[str | None, set[int]] = defaultdict(set)
    for rollout in rollouts:
        parts: list[tuple[str | None, int]] = [
            (why.heading, count) for item in rollout.completions for why, count in item.left_out.items()
        ]
        parts += [(None, item.trained) for item in rollout.completions if item.trained]
        for name, count in parts + ([(rollout.why.heading, 0)] if rollout.why else []):
            tokens[name] += count
            of_rollouts[name].add(rollout.rollout_id)
            of_groups[name].add(rollout.group_id)
    tallies = {name: Tally(len(of_groups[name]), len(of_rollouts[name]), tokens[name]) for name in tokens}
    return StepSums(tallies.pop(None, Tally()), {name: tallies[name] for name in sorted(filter(None, tallies))})


def write_fates(connection: Connection, version_id: int, rollouts: Iterable[RolloutFate]) -> None:
    """Store the fates of a new version's step, in place of those of a step that a rollback retired."""
    rows = [
        {
            "completion_id": item.completion_id,
            "version_id": version_id,
            "trained": item.trained,
            "left_out": {str(why): count for why, count in item.left_out.items()},
        }
        for rollout in rollouts
        for item in rollout.completions
    ]
    for start in range(0, len(rows), IDS_PER_QUERY):
        some = rows[start : start + IDS_PER_QUERY]
        connection.execute(delete(table).where(table.c.completion_id.in_([row["completion_id"] for row in some])))
        connection.execute(insert(table), some)
