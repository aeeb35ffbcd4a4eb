"""Which task and which agent come next: pure functions of the seed and of how many groups came before.

So a resumed run goes on as if it had not stopped. Each group has one agent, since its rewards are compared with each
other.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from harness.agents.base import Agent
from harness.tasks import Task
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


def order(tasks: Sequence[Task], seed: int, weights: Mapping[str, float]) -> Iterator[Task]:
    """The tasks for ever, shuffled anew in every epoch.

    With weights, each turn first draws a domain, and takes the next task of that domain's own order.
    """
    if not weights:
        for epoch in count():
            yield from random.Random(f"{seed}-{epoch}").sample(tasks, len(tasks))
    by_domain = defaultdict(list)
    for task in tasks:
        by_domain[task.domain].append(task)
    lines = {domain: order(found, seed, {}) for domain, found in by_domain.items()}
    domains = sorted(domain for domain in lines if weights.get(domain, 0))
    for index in count():
        [domain] = random.Random(f"{seed}-domain-{index}").choices(domains, [weights[domain] for domain in domains])
        yield next(lines[domain])


def check_weights(what: str, weights: Mapping[str, float]) -> None:
    """UserError for weights that make no sense."""
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight < 0:
            raise UserError(f"the weight of {what} {name!r} must be a number of at least 0: {weight}")
    if weights and not sum(weights.values()):
        raise UserError(f"the weights of {what}s are all 0, so nothing would run; give one of them a weight")


def check_domains(tasks: Sequence[Task], weights: Mapping[str, float]) -> None:
    """UserError for weights that do not fit the tasks."""
    check_weights("domain", weights)
    there = {task.domain for task in tasks}
    for domain in weights:
        if domain not in there:
            raise UserError(
                f"the domain {domain!r} has a weight and no task; the tasks' domains are: {', '.join(sorted(there))}"
            )
    if weights and (forgotten := sorted(there - weights.keys())):
        raise UserError(f"the domain {forgotten[0]!r} has tasks and no weight; give it one, 0 to leave it out")


def check_scaffolds(scaffolds: Sequence[Scaffold], purpose: str) -> None:
    """UserError for agents that cannot share a run."""
    names = [scaffold.name for scaffold in scaffolds]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two agents of the run have the name {name!r}; give each a name of its own")
    check_weights("agent", {scaffold.name: scaffold.weight for scaffold in scaffolds})
    if purpose == "train" and all(scaffold.held_out or not scaffold.weight for scaffold in scaffolds):
        raise UserError("every agent of the run is held out, so nothing could be trained; use `harness eval`")
