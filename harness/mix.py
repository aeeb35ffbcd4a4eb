"""Which agent comes next: a pure function of the seed and of how many groups came before (tasks: harness/tasks/mix.py).

So a resumed run goes on as if it had not stopped. Each group has one agent, since its rewards are compared with each
other.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.agents.base import Agent
from proxy.pool.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Scaffold:
    """An agent's part in a run."""

    name: str
    """In the pool and in tables."""
    agent: Agent
    weight: float = 1
    held_out: bool = False
    """For evaluation: recorded, and never trained."""


def scaffold_of(index: int, seed: int, scaffolds: Sequence[Scaffold]) -> Scaffold:
    """Whose turn the group of this index is."""
    weights = [scaffold.weight for scaffold in scaffolds]
    return random.Random(f"{seed}-agent-{index}").choices(scaffolds, weights)[0]


def check_weights(what: str, weights: Mapping[str, float]) -> None:
    """UserError for weights that make no sense."""
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise UserError(f"the weight of {what} {name!r} must be a number of at least 0: {weight}")
    if weights and not sum(weights.values()):
        raise UserError(f"the weights of {what}s are all 0, so nothing would run; give one of them a weight")


def check_scaffolds(scaffolds: Sequence[Scaffold], purpose: str) -> None:
    """UserError for agents that cannot share a run."""
    names = [scaffold.name for scaffold in scaffolds]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two agents of the run have the name {name!r}; give each a name of its own")
    check_weights("agent", {scaffold.name: scaffold.weight for scaffold in scaffolds})
    if purpose == "train" and all(scaffold.held_out or not scaffold.weight for scaffold in scaffolds):
        raise UserError("every agent of the run is held out, so nothing could be trained; use `harness eval`")
