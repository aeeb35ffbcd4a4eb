"""Decides which task comes next: a pure function of the seed and of how many came before, so that runs can resume.

Without weights every task comes once per epoch, in a new random order. With weights the sources (or domains) alternate
by smooth weighted round robin: after any number of tasks each has had its share to within about one task, and each goes
through its own tasks in its own epochs. With `revisit`, tasks that are always or never solved are skipped most of the
time; then the next task also depends on the rewards that the pool holds. Left out: weights that change during a run.

Words: a *part* is the tasks that share one weight: those of a source, or, where domains have weights, those of one
source in one domain; without weights all tasks are one part. Its *line* is its tasks in the order in which they come,
epoch after epoch, and a *place* is the number of a task in a line, from 0 on. A *turn* says which part gives the next
task. The texts that seed the random orders must stay as they are, or a resumed run would go on in another order.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice, repeat

from harness.tasks.schema import Task
from proxy.pool.errors import UserError


@dataclass(frozen=True)
class TaskSource:
    """The tasks of one source, and how often they come."""

    name: str
    tasks: Sequence[Task]
    weight: float | None = None
    """Relative to the other sources' weights. None: no source has one."""


@dataclass(frozen=True)
class TaskMix:
    """All tasks of a run, and how often those of each source and domain come."""

    sources: Sequence[TaskSource]
    """Each has tasks, or a line of a source without any would go on in search of one for ever."""
    domains: Mapping[str, float] = field(default_factory=dict)
    """Domain -> weight. Empty: domains have no weights."""
    revisit: float | None = None
    """How often a settled task (proxy/pool/rollouts/queue.py) is taken when it comes, above 0 and at most 1. Else it
    is skipped. None: no task is skipped."""

    @property
    def tasks(self) -> list[Task]:
        return [task for source in self.sources for task in source.tasks]

    def first(self, number: int | None) -> "TaskMix":
        """The mix of the first `number` tasks, in the order of the sources. None: all."""
        if number is None:
            return self
        sources = []
        for source in self.sources:
            sources.append(replace(source, tasks=source.tasks[:number]))
            number -= len(sources[-1].tasks)
        return replace(self, sources=[source for source in sources if source.tasks])

    def weights(self) -> dict[str, float]:
        """All weights by name of source or domain: they must not change when a run is resumed."""
        weighted = {source.name: source.weight for source in self.sources if source.weight is not None}
        return weighted | dict(self.domains)

    def order(self, seed: int) -> Iterator[Task]:
        """The tasks in the order of the run, without end."""
        lines = self._lines(seed)
        return (next(lines[part]) for part in self._turns())

    def skipping_settled(
        self, seed: int, places: Sequence[int], settled: Callable[[Task], bool]
    ) -> Iterator[tuple[Task, int]]:
        """The tasks in the order of the run without most of the settled ones, each with its place, without end.

        `places`: those of the tasks that the run has had, in their order; the next task is the first one here.
        `settled`: asked about each task when it comes; a settled one is skipped, or revisited as the seed decides. The
        next one of the same line takes its turn, so that weights hold.
        """
        assert self.revisit is not None  # without, a line in which all is settled would be searched for ever
        lines, turns, reached = self._lines(seed), self._turns(), Counter[int]()
        # `places` comes first: when it is used up, zip stops without taking one more of `turns`, which goes on below
        for place, part in zip(places, turns, strict=False):
            reached[part] = place + 1
        lines = [islice(line, reached[part], None) for part, line in enumerate(lines)]
        for part in turns:
            for task in lines[part]:
                place, reached[part] = reached[part], reached[part] + 1
                revisited = random.Random(f"{seed}-revisit-{part}-{place}").random() < self.revisit
                if revisited or not settled(task):
                    yield task, place
                    break

    def check(self) -> "TaskMix":
        """Return the mix. UserError when weights and tasks do not fit together."""
        for name, weight in self.weights().items():
            if weight <= 0:
                raise UserError(f"the weight of {name} is {weight}; give it a number above 0, or leave its tasks out")
        there = {task.domain for task in self.tasks}
        for domain in sorted(self.domains.keys() - there):
            raise UserError(f"the domain {domain!r} has a weight and no task; there are: {', '.join(sorted(there))}")
        for domain in sorted(there - self.domains.keys()) if self.domains else ():
            raise UserError(f"the domain {domain!r} has tasks and no weight; give it one, or leave its tasks out")
        without = [source for source in self.sources if source.weight is None]
        if 0 < len(without) < len(self.sources):
            raise UserError(f"the source {without[0].name} has no weight and others have; give every source one")
        return self

    def _lines(self, seed: int) -> list[Iterator[Task]]:
        """The line of each part."""
        if not self.weights():
            return [shuffled(self.tasks, str(seed))]
        return [shuffled(tasks, f"{seed}-{index}") for index, (_, tasks) in enumerate(self._parts())]

    def _turns(self) -> Iterator[int]:
        """The index of the part that gives the next task, without end."""
        return by_turns([weight for weight, _ in self._parts()]) if self.weights() else repeat(0)

    def _parts(self) -> list[tuple[float, Sequence[Task]]]:
        """Weight and tasks of each part. The sources of a domain divide its weight in the ratio of their own."""
        if not self.domains:
            return [(source.weight or 1.0, source.tasks) for source in self.sources]
        parts: list[tuple[float, Sequence[Task]]] = []
        for domain, weight in sorted(self.domains.items()):
            chosen = [
                (source.weight or 1.0, [task for task in source.tasks if task.domain == domain])
                for source in self.sources
            ]
            having = [(own, tasks) for own, tasks in chosen if tasks]
            whole = sum(own for own, _ in having)
            parts += [(weight * own / whole, tasks) for own, tasks in having]
        return parts


def shuffled(tasks: Sequence[Task], seed: str) -> Iterator[Task]:
    """Every task once per epoch, each epoch in a new random order, without end. There must be a task."""
    for epoch in count():
        yield from random.Random(f"{seed}-{epoch}").sample(tasks, len(tasks))


def by_turns(weights: Sequence[float]) -> Iterator[int]:
    """Alternate between the indices of `weights`, without end: smooth weighted round robin.

    Each turn adds to every index its weight as credit. The one with the most is next, and pays the sum of the weights.
    """
    credits = [0.0] * len(weights)
    while True:
        credits = [credit + weight for credit, weight in zip(credits, weights, strict=True)]
        turn = max(range(len(credits)), key=credits.__getitem__)
        credits[turn] -= sum(weights)
        yield turn
