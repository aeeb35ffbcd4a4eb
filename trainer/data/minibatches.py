"""Divide the groups of a step over its optimizer updates, before ranks divide each update.

A group stays whole, with its prefix trees. Left out: ranks and micro-batches (trainer/data/packing.py).
"""

import random
from collections.abc import Sequence

from trainer.data.row import TrainingRow


def inputs(rows: Sequence[TrainingRow]) -> float:
    """The cost of a group's rows by the tokens that the model computes, without prefix trees."""
    return sum(row.inputs for row in rows)


def teaches(row: TrainingRow, other_terms: bool) -> bool:
    """Whether a row moves the weights. `other_terms`: the loss has terms that need no advantage (KL, balance)."""
    return bool(row.inputs and row.weight and (other_terms or row.advantage[row.places].any()))


def by_minibatch(costs: Sequence[float], teaching: Sequence[bool], most: int) -> list[list[int]]:
    """The groups of each minibatch by their place, in order: as equal in cost as whole groups allow.

    `teaching`: whether a group has something to train. Every minibatch has such a group, so there are at most as many
    minibatches as such groups, and at most `most`, but at least one.
    """
    loads = [0.0] * max(1, min(most, sum(teaching)))
    minibatches: list[list[int]] = [[] for _ in loads]
    # Those that teach come first, so each minibatch gets one before the lightest gets a second.
    for place in sorted(range(len(costs)), key=lambda place: (not teaching[place], -costs[place])):
        lightest = loads.index(min(loads))
        loads[lightest] += costs[place]
        minibatches[lightest].append(place)
    return [sorted(places) for places in minibatches]


def orders(minibatches: int, epochs: int, step: int) -> list[list[int]]:
    """The order of the minibatches in each epoch. A step that is trained again has the same orders."""
    generator = random.Random(step)
    return [generator.sample(range(minibatches), minibatches) for _ in range(epochs)]
