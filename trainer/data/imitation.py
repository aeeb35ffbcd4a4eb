"""Rows that a step imitates beside its own: which ones, and what they weigh. Their loss is -log p; they have no
advantage.

Nothing records why a source leaves something out (masked cheats, `min_reward`, `why_not_imitable`): its tokens belong
to the account of the run that sampled them.
Left out: the loss (trainer/loss/policy_loss.py); the warm start, which does nothing else (trainer/commands/sft.py).
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from proxy.pool.training.finished_rollouts import RecordedRollout
from trainer.config.imitation import Imitation
from trainer.config.model_shape import ExpertShape
from trainer.data.assemble import merge, trained_tokens, why_not_imitable
from trainer.data.routed_experts import UNKNOWN
from trainer.data.row import TrainingRow


def demonstrations(
    rollouts: Iterable[RecordedRollout], min_reward: float | None, labels: Sequence[str]
) -> dict[int, list[TrainingRow]]:
    """The rows to imitate, by group, since the members of a group share their task.

    Rollouts that are masked as cheats have none. Groups without any are left out.
    """
    why_not = partial(why_not_imitable, labels=labels)
    groups: dict[int, list[TrainingRow]] = {}
    for rollout in rollouts:
        if rollout.masked:
            continue
        if min_reward is None or (rollout.reward is not None and rollout.reward >= min_reward):
            groups.setdefault(rollout.group_id, []).extend(merge(rollout.completions, 1.0, Counter(), why_not))
    return {group_id: rows for group_id, rows in groups.items() if rows}


def chosen(rows: Sequence[TrainingRow], source: Imitation, step: int) -> list[TrainingRow]:
    """The rows of a source that a step imitates. A step that is trained again has the same ones."""
    return random.Random(f"{source.run} {step}").sample(list(rows), min(source.rows, len(rows)))


def denominator(rows: Sequence[TrainingRow]) -> int:
    """What the loss of an update is divided by: its tokens that are reinforced, or 1 where it only imitates."""
    return trained_tokens(row for row in rows if not row.imitated) or int(any(row.imitated for row in rows))


def mixed(
    minibatches: Sequence[Sequence[TrainingRow]],
    sources: Sequence[Sequence[TrainingRow]],
    weights: Sequence[float],
    mixture: ExpertShape | None,
) -> list[list[TrainingRow]]:
    """The minibatches with the rows that the step imitates, divided among them evenly.

    Each source adds its weight times the mean loss of its tokens in the minibatch, however much is reinforced there.
    `mixture`: the model that replays recorded experts; for these rows its own routers choose.
    """
    whole = []
    for number, own in enumerate(minibatches):
        shares = [rows[number :: len(minibatches)] for rows in sources]
        common = trained_tokens(own) or 1
        whole.append(list(own))
        for rows, weight in zip(shares, weights, strict=True):
            factor = weight * common / max(1, trained_tokens(rows))
            whole[-1] += [replace(row, imitated=True, weight=factor, experts=_own_choice(row, mixture)) for row in rows]
    return whole


def imitated_tokens(rows: Iterable[TrainingRow]) -> dict[int, int]:
    """How many tokens of each completion these rows imitate."""
    counts = ((row.completions, np.bincount(row.segment[row.trained], minlength=len(row.completions))) for row in rows)
    return {id: int(count) for ids, some in counts for id, count in zip(ids, some, strict=True)}


def _own_choice(row: TrainingRow, mixture: ExpertShape | None) -> np.ndarray | None:
    if mixture is None:
        return None
    return np.full((len(row.tokens), len(mixture.layers), mixture.per_token), UNKNOWN, dtype=np.int16)
