"""Turn recorded completions into rows with advantages and weights.

Each completion is trained on exactly the context it was sampled in. Where a completion's prompt begins with the whole
path of an earlier one of its attempt (a history that only grew), both become one row: causal attention makes that
exact. Left out: sharing between branches or members of a group (trainer/data/tree.py), micro-batches
(trainer/data/packing.py).
"""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import paths
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout
from proxy.pool.untrained import Untrained, UntrainedReason
from trainer.config import Loss
from trainer.config.batch import TRAINED
from trainer.config.model_shape import ExpertShape
from trainer.config.step import StepOptions
from trainer.credit import assign
from trainer.credit.token_weights import token_scales
from trainer.data.routed_experts import RecordedExperts, demand_recorded
from trainer.data.row import TrainingRow

NEGATIVE = Untrained(UntrainedReason.NEGATIVE_ADVANTAGE)


@dataclass(frozen=True)
class TrainingBatch:
    """The rows that a step trains on, and what it leaves out."""

    rows: list[TrainingRow]
    excluded: Counter[Untrained]
    """Sampled tokens that are in no row as trained, by reason."""
    rewards: list[float]
    """Rewards of the members with a verdict, as the verifier gave them."""
    dropped_groups: int
    """Groups without rows: their rewards are equal, or too few members have one."""
    masked: Counter[Untrained]
    """Trained tokens whose advantage is set to 0, by reason. They count in every denominator."""
    unplaced_rewards: int = 0
    """Process rewards that name no turn of their rollout."""

    @property
    def tokens(self) -> int:
        """Number of trained tokens: the flat denominator of the loss."""
        return sum(int(row.trained.sum()) for row in self.rows)


def why_not_trainable(
    item: Completion, labels: Sequence[str] = TRAINED, max_tokens: int | None = None
) -> Untrained | None:
    """The reason why a completion is excluded from policy training, or None. One without a label is trained.

    `max_tokens`: of the tokens that the model computes for it, those before the last sampled one. None: any number.
    """
    if item.untrainable is not None:
        return item.untrainable
    if item.label is not None and item.label not in labels:
        return Untrained(UntrainedReason.LABEL, item.label)
    if len(item.logprobs) != item.sampled_count:
        return Untrained(UntrainedReason.LOGPROBS_MISSING)
    if max_tokens is not None and item.sampled_count and item.prompt_length + item.sampled_places()[-1] > max_tokens:
        return Untrained(UntrainedReason.TOO_LONG)
    return None


def why_not_imitable(item: Completion, labels: Sequence[str] = TRAINED) -> Untrained | None:
    """The reason why a completion is excluded from imitation, or None.

    Imitation needs no logprobs, but only takes replies that ended by themselves.
    """
    if item.label is not None and item.label not in labels:
        return Untrained(UntrainedReason.LABEL, item.label)
    finished = item.finish_reason in ("stop", "tool_calls")
    return None if finished else Untrained(UntrainedReason.UNFINISHED, item.finish_reason)


def assemble(groups: Sequence[LeasedGroup], options: StepOptions) -> TrainingBatch:
    """The rows of a step's groups, with their advantages and weights.

    UserError when experts are to be replayed and none were recorded.
    """
    why_not = partial(why_not_trainable, labels=options.labels, max_tokens=options.max_tokens)
    rollouts: list[list[TrainingRow]] = []
    weights: list[float] = []
    excluded: Counter[Untrained] = Counter()
    masked: Counter[Untrained] = Counter()
    credits = assign.group_credits(groups, options)
    for group, credit in zip(groups, credits, strict=True):
        for member, advantages in zip(group.rollouts, credit.members, strict=True):
            if advantages is None:
                reason = member.untrained or credit.dropped or Untrained(UntrainedReason.NO_REWARD)
                excluded[reason] += sum(len(item.sampled) for item in member.completions)
            else:
                rows = merge(member.completions, advantages, excluded, why_not, mixture=options.mixture)
                rollouts.append(_masked(rows, member, options, masked))
                weights.append(credit.weight * member.weight)
    if options.mixture is not None:
        demand_recorded([row for own in rollouts for row in own])
    members = (member for group in groups for member in group.rollouts)
    return TrainingBatch(
        rows=_weighed(rollouts, weights, options.loss),
        excluded=excluded,
        rewards=[member.verdict for member in members if member.verdict is not None],
        dropped_groups=sum(credit.dropped is not None for credit in credits),
        masked=masked,
        unplaced_rewards=sum(credit.unplaced for credit in credits),
    )


def _masked(
    rows: list[TrainingRow], member: LeasedRollout, options: StepOptions, masked: Counter[Untrained]
) -> list[TrainingRow]:
    """The rows of a rollout, with advantage 0 where they must not teach. Their tokens stay in every count.

    A rollout that is masked as a whole has weight 0 in all terms of the policy's loss. Masked negatives keep the terms
    without an advantage (KL). Adds to `masked`.
    """
    reason = _why_masked(member, options)
    trained = sum(int(row.trained.sum()) for row in rows)
    factor = 0.0 if reason else options.loss.negatives().factor(-1.0, trained, options.step)
    masked_rows = []
    for row in rows:
        changed = np.ones_like(row.trained) if reason else row.advantage < 0
        if factor == 0:
            masked[reason or NEGATIVE] += int((changed & row.trained).sum())
        advantage = np.where(changed, row.advantage * np.float32(factor), row.advantage)
        masked_rows.append(replace(row, advantage=advantage, weight=0.0 if reason else row.weight))
    return masked_rows


def _why_masked(member: LeasedRollout, options: StepOptions) -> Untrained | None:
    """Why a rollout must not teach although its reward is in the baseline."""
    if options.max_staleness is not None and member.staleness > options.max_staleness:
        return Untrained(UntrainedReason.STALE)
    turns = assign.turns_of(member, options.labels)
    truncated = options.credit.mask_truncated and turns and turns[-1].finish_reason == "length"
    return Untrained(UntrainedReason.TRUNCATED) if truncated else None


def _weighed(rollouts: Sequence[Sequence[TrainingRow]], weights: Sequence[float], loss: Loss) -> list[TrainingRow]:
    """All rows with their weights: the loss's normalisation, relative to the mean over all trained tokens."""
    rows = [row for own in rollouts for row in own]
    counts = [int(row.trained.sum()) for row in rows]
    owners = [index for index, own in enumerate(rollouts) for _ in own]
    copies = [weights[owner] for owner in owners]
    scales = token_scales(counts, owners, loss.norm, loss.norm_constant, weights=copies)
    tokens = max(1, sum(counts))
    return [replace(row, weight=row.weight * scale * tokens) for row, scale in zip(rows, scales, strict=True)]


@dataclass
class _GrowingRow:
    """A row that is still growing: its longest path, and the completions that are trained in it."""

    tokens: "array[int]"
    parts: list[Completion] = field(default_factory=list)


def merge(
    chain: Sequence[Completion],
    advantage: float | Mapping[int, float],
    excluded: Counter[Untrained],
    why_not: Callable[[Completion], Untrained | None],
    *,
    mixture: ExpertShape | None = None,
) -> list[TrainingRow]:
    """The rows of one attempt's completions, which must be in commit order. Adds to `excluded` what they leave out.

    `advantage`: one for all sampled tokens, or one for each completion, by its id. `why_not` returns the reason why a
    completion is excluded, or None. `mixture`: the model whose recorded experts are replayed.
    """
    try:
        path_of = paths(chain)
    except ValueError:
        excluded[Untrained(UntrainedReason.CHECKSUM)] += sum(len(item.sampled) for item in chain)
        return []
    growing: list[_GrowingRow] = []
    recorded = None if mixture is None else RecordedExperts(chain, mixture)
    for item in chain:
        reason = why_not(item)
        if reason is not None:
            excluded[reason] += len(item.sampled)
        elif item.sampled_count:
            draft = _continued(growing, path_of[item.id], item, recorded)
            draft.tokens = path_of[item.id]
            draft.parts.append(item)
        if reason is None and item.given:
            excluded[Untrained(UntrainedReason.GIVEN)] += item.given_count
    rows = [_row(draft, advantage, excluded) for draft in growing]
    if recorded is None:
        return rows
    return [replace(row, experts=recorded.along(draft.parts[-1].id)) for row, draft in zip(rows, growing, strict=True)]


def _continued(
    growing: list[_GrowingRow], path: "array[int]", item: Completion, recorded: RecordedExperts | None
) -> _GrowingRow:
    """The longest row that the prompt of `item` begins with, or a new one.

    With recorded experts, the row's experts must also be those of the prompt.
    """
    for draft in sorted(growing, key=lambda draft: -len(draft.tokens)):
        size = len(draft.tokens)
        if size <= item.prompt_length and path[:size] == draft.tokens:
            if recorded is None or recorded.continues(item.id, draft.parts[-1].id, size):
                return draft
    growing.append(_GrowingRow(array("i")))
    return growing[-1]


def _row(draft: _GrowingRow, advantage: float | Mapping[int, float], excluded: Counter[Untrained]) -> TrainingRow:
    """The row of the completions that were merged. Adds to `excluded` the tokens whose logprob is not finite."""
    tokens = np.array(draft.tokens, dtype=np.int64)
    trained = np.zeros(len(tokens), dtype=bool)
    logp = np.zeros(len(tokens), dtype=np.float32)
    segment = np.zeros(len(tokens), dtype=np.int64)
    scores = np.zeros(len(tokens), dtype=np.float32)
    for index, item in enumerate(draft.parts):
        places = item.prompt_length + np.array(item.sampled_places(), dtype=np.int64)
        trained[places], segment[places] = True, index
        scores[places] = advantage if isinstance(advantage, float) else advantage[item.id]
        if len(item.logprobs) == len(places):
            logp[places] = item.logprobs
    impossible = trained & ~np.isfinite(logp)
    impossible[0] |= trained[0]  # nothing predicts the first token of a row
    if impossible.any():
        excluded[Untrained(UntrainedReason.LOGPROB_NOT_FINITE)] += int(impossible.sum())
        trained &= ~impossible
    sampled_by = tuple(item.id for item in draft.parts)
    return TrainingRow(tokens, trained, np.where(trained, logp, 0), scores, segment, completions=sampled_by)
