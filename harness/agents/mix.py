"""Chooses the agent of each group by weight: a pure function of the seed and of the number of groups before it.

So a resumed run goes on as if it had not stopped. All members of a group have the same agent, since their rewards are
compared with each other.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from harness.agents.base import Agent
from harness.tasks import Task
from proxy.pool.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Scaffold:
    """An agent in a run, with its name and its share of the groups."""

    name: str
    """Name in the pool and in tables."""
    agent: Agent
    weight: float = 1
    held_out: bool = False
    """Whether it is for evaluation: its rollouts are recorded, and never trained on."""


def scaffold_of(index: int, seed: int, scaffolds: Sequence[Scaffold]) -> Scaffold:
    """The agent of the group with this index."""
    weights = [scaffold.weight for scaffold in scaffolds]
    return random.Random(f"{seed}-agent-{index}").choices(scaffolds, weights)[0]


def check(scaffolds: Sequence[Scaffold], purpose: str) -> None:
    """Check the agents of a run. UserError for equal names, weights that make no sense, and no agent to train."""
    names = [scaffold.name for scaffold in scaffolds]
    for scaffold in scaffolds:
        if names.count(scaffold.name) > 1:
            raise UserError(f"two agents of the run have the name {scaffold.name!r}; give each a name of its own")
        if not math.isfinite(scaffold.weight) or scaffold.weight < 0:
            raise UserError(
                f"the weight of agent {scaffold.name!r} is {scaffold.weight}; it must be a number of at least 0"
            )
    if not any(scaffold.weight for scaffold in scaffolds):
        raise UserError("the weights of all agents are 0, so nothing would run; give one of them a weight")
    if purpose == "train" and all(scaffold.held_out or not scaffold.weight for scaffold in scaffolds):
        raise UserError("every agent of the run is held out, so nothing could be trained; use `harness eval`")


def check_servers(scaffolds: Sequence[Scaffold], tasks: Sequence[Task], evaluated: Sequence[Task] = ()) -> None:
    """Check that each agent can use the MCP servers of the tasks that it may get. UserError for the first that cannot.

    `evaluated`: tasks of evaluations, which agents with weight 0 get too.
    """
    for scaffold in scaffolds:
        needed = {
            server.spoken: task.id
            for task in (*(tasks if scaffold.weight else ()), *evaluated)
            for server in task.mcp
        }  # fmt: skip
        for spoken in sorted(needed.keys() - scaffold.agent.mcp):
            raise UserError(
                f"task {needed[spoken]!r} has an MCP server over {spoken}, which the agent {scaffold.name!r} cannot "
                "use; leave out one of them (docs/agents.md says which agents have MCP)"
            )


def check_kinds(scaffolds: Sequence[Scaffold], kinds: Sequence[str]) -> None:
    """Check that each agent works with these variations (`augment`). UserError for the first that does not."""
    for scaffold in scaffolds:
        if scaffold.weight and (unfit := sorted(scaffold.agent.fixed.intersection(kinds))):
            raise UserError(
                f"augment = {unfit[0]} changes names that the agent {scaffold.name!r} speaks of in its own prompts; "
                "leave out one of them (docs/augmentation.md)"
            )
