"""Decides which task comes next: a pure function of the seed and of how many came before, so that runs can resume.

Without weights every task comes once per epoch, in a new random order. With weights the sources (or domains) alternate
by smooth weighted round robin: after any number of tasks each has had its share to within about one task, and each goes
through its own tasks in its own epochs. With `revisit`, tasks that are always or never solved are skipped most of the
time; then the next task also depends on the rewards that the pool holds. Left out: weights that change during a run.
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


@dataclass(frozen=True)
class TaskMix:
    """All tasks of a run, and how often those of each source and domain come."""

    sources: Sequence[TaskSource]
    domains: Mapping[str, float] = field(default_factory=dict)
    """Domain -> weight. Empty: domains have no weights."""
    revisit: float | None = None
    """Share of the turns of settled tasks (proxy/pool/rollouts/queue.py) that are taken. None: no task is skipped."""

    @property
    def tasks(self) -> list[Task]:
        return [task for source in self.sources for task in source.tasks]

    def first(self, number: int | None) -> "TaskMix":
        """The mix of the first `number` tasks. None: all."""
        if number is None:
            return self
        sources = []
        for source in self.sources:
            sources.append(replace(source, tasks=source.tasks[:number]))
            number -= len(sources[-1].tasks)
        return replace(self, sources=[source for source in sources if source.tasks])

    def weights(self) -> dict[str, float]:
        """All weights by name: they must not change when a run is resumed."""
        return {source.name: source.weight for source in self.sources if source.weight} | dict(self.domains)

    def order(self, seed: int) -> Iterator[Task]:
        """The tasks in the order of the run, without end."""
        lines = self._lines(seed)
        return (next(lines[turn]) for turn in self._turns())

    def unsettled(
        self, seed: int, places: Sequence[int], settled: Callable[[Task], bool]
    ) -> Iterator[tuple[Task, int]]:
        """The tasks that follow on those at `places`, each with its own place in the line of its source, without end.

        A task that is settled when its turn comes is skipped, or revisited as the seed decides. The next one of the
        same line takes its turn, so that weights hold.
        """
        lines, turns, reached = self._lines(seed), self._turns(), Counter[int]()
        for place, turn in zip(places, turns, strict=False):  # in this order: zip takes no turn behind the last place
            reached[turn] = place + 1
        lines = [islice(line, reached[turn], None) for turn, line in enumerate(lines)]
        for turn in turns:
            for task in lines[turn]:
                place, reached[turn] = reached[turn], reached[turn] + 1
                revisited = random.Random(f"{seed}-revisit-{turn}-{place}").random() < (self.revisit or 0.0)
                if revisited or not settled(task):
                    yield task, place
                    break

    def check(self) -> "TaskMix":
        """Return the mix. UserError when weights and tasks do not fit together."""
        for name, weight in self.weights().items():
            if weight <= 0:
                raise UserError(f"the weight of {name} is {weight}; give it a number above 0, or leave its tasks out")
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

    def _lines(self, seed: int) -> list[Iterator[Task]]:
        """Return each share's tasks in the order in which they come, without end."""
        if not self.weights():
            return [shuffled(self.tasks, str(seed))]
        return [shuffled(tasks, f"{seed}-{index}") for index, (_, tasks) in enumerate(self._shares())]

    def _turns(self) -> Iterator[int]:
        """The index of the share whose turn it is, without end."""
        return by_turns([weight for weight, _ in self._shares()]) if self.weights() else repeat(0)

    def _shares(self) -> list[tuple[float, Sequence[Task]]]:
        """Weight and tasks of each source; where domains have weights, of each source's part in each domain."""
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
    """The tasks that belong to a domain."""
    return [task for task in tasks if task.domain == domain]


def shuffled(tasks: Sequence[Task], seed: str) -> Iterator[Task]:
    """Every task once per epoch, each epoch in a new random order, without end."""
    for epoch in count():
        yield from random.Random(f"{seed}-{epoch}").sample(tasks, len(tasks))


def by_turns(weights: Sequence[float]) -> Iterator[int]:
    """Alternate by smooth weighted round robin: the share with the highest credit is next."""
    credits = [0.0] * len(weights)
    while True:
        credits = [credit + weight for credit, weight in zip(credits, weights, strict=True)]
        turn = max(range(len(credits)), key=credits.__getitem__)
        credits[turn] -= sum(weights)
        yield turn
