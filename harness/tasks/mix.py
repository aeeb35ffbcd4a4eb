"""Which task comes next: a pure function of the seed and of how many came before, so that a resumed run goes on alike.

Without weights every task comes once an epoch, shuffled anew. With weights the sources (or domains) take turns by their
shares: after any number of tasks each has had its share, to within one task or so, and each goes through its own tasks
in epochs of its own. Left out: weights that change during a run, by difficulty say.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from harness.tasks.schema import Task
from proxy.pool.errors import UserError


@dataclass(frozen=True)
class TaskSource:
    """Tasks that came from one place."""

    name: str
    tasks: Sequence[Task]
    weight: float | None = None


@dataclass(frozen=True)
class TaskMix:
    """All tasks of a run, and how often which of them come."""

    sources: Sequence[TaskSource]
    domains: Mapping[str, float] = field(default_factory=dict)
    """Weight of each domain; empty: none has one."""

    @property
    def tasks(self) -> list[Task]:
        return [task for source in self.sources for task in source.tasks]

    def first(self, number: int | None) -> "TaskMix":
        """The mix of the first so many tasks; None: all."""
        if number is None:
            return self
        sources = []
        for source in self.sources:
            sources.append(replace(source, tasks=source.tasks[:number]))
            number -= len(sources[-1].tasks)
        return replace(self, sources=[source for source in sources if source.tasks])

    def weights(self) -> dict[str, float]:
        """What a resumed run must have in common with its beginning."""
        return {source.name: source.weight for source in self.sources if source.weight} | dict(self.domains)

    def order(self, seed: int) -> Iterator[Task]:
        """The tasks, without end."""
        if not self.weights():
            return shuffled(self.tasks, str(seed))
        return by_turns(self._shares(), seed)

    def check(self) -> "TaskMix":
        """The mix; UserError when weights and tasks do not fit."""
        there = {task.domain for task in self.tasks}
        for domain in self.domains.keys() - there:
            raise UserError(f"the domain {domain!r} has a weight and no task; there are: {', '.join(sorted(there))}")
        for domain in there - self.domains.keys() if self.domains else set[str]():
            raise UserError(f"the domain {domain!r} has tasks and no weight; give it one, or leave its tasks out")
        weighted = [source for source in self.sources if source.weight is not None]
        for source in self.sources:
            if weighted and source.weight is None:
                raise UserError(f"the source {source.name} has no weight and others have; give every source one")
        return self

    def _shares(self) -> list[tuple[float, Sequence[Task]]]:
        """Weight and tasks of each source, divided by domain where domains have weights."""
        if not self.domains:
            return [(source.weight or 1.0, source.tasks) for source in self.sources]
        shares: list[tuple[float, Sequence[Task]]] = []
        for domain, weight in sorted(self.domains.items()):
            having = [(source.weight or 1.0, of(domain, source.tasks)) for source in self.sources]
            having = [(share, tasks) for share, tasks in having if tasks]
            whole = sum(share for share, _ in having)
            shares += [(weight * share / whole, tasks) for share, tasks in having]
        return shares


def of(domain: str, tasks: Sequence[Task]) -> list[Task]:
    """The tasks of a domain."""
    return [task for task in tasks if task.domain == domain]


def shuffled(tasks: Sequence[Task], seed: str) -> Iterator[Task]:
    """Every task once an epoch, each epoch in an order of its own."""
    for epoch in count():
        yield from random.Random(f"{seed}-{epoch}").sample(tasks, len(tasks))


def by_turns(shares: Sequence[tuple[float, Sequence[Task]]], seed: int) -> Iterator[Task]:
    """Smooth weighted round robin: whoever is owed most is next."""
    lines = [shuffled(tasks, f"{seed}-{index}") for index, (_, tasks) in enumerate(shares)]
    owed = [0.0] * len(shares)
    whole = sum(weight for weight, _ in shares)
    while True:
        owed = [debt + weight for debt, (weight, _) in zip(owed, shares, strict=True)]
        turn = max(range(len(owed)), key=owed.__getitem__)
        owed[turn] -= whole
        yield next(lines[turn])
