"""Turn recorded completions into rows with advantages and weights.

Each completion is trained on exactly the context it was sampled in. Where a completion's prompt begins with the whole
path of an earlier one of its attempt (a history that only grew), both become one row: causal attention makes that
exact. Left out: sharing between branches or members of a group (trainer/data/tree.py), micro-batches
(trainer/data/packing.py).
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from proxy.pool.completions.records import CUT_FINISH_REASONS, Completion
from proxy.pool.completions.store import paths
from proxy.pool.training.fates import CompletionFate, RolloutFate
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout
from proxy.pool.untrained import Untrained, UntrainedReason
from trainer.config import Loss
from trainer.config.batch import TRAINED
from trainer.config.model_shape import ExpertShape
from trainer.config.step import StepOptions
from trainer.credit import assign
from trainer.credit.token_weights import token_scales
from trainer.data.minibatches import by_minibatch, inputs, teaches
from trainer.data.routed_experts import RecordedExperts, demand_recorded
from trainer.data.row import TrainingRow

Cost = Callable[[Sequence[TrainingRow]], float]
NEGATIVE = Untrained(UntrainedReason.NEGATIVE_ADVANTAGE)


@dataclass
class TokenFate:
    """What a step does with the tokens of a completion's answer. Each token counts in one field."""

    trained: int = 0
    """Trained tokens, without the masked ones."""
    excluded: Counter[Untrained] = field(default_factory=Counter)
    masked: Counter[Untrained] = field(default_factory=Counter)


@dataclass(frozen=True)
class MemberFate:
    """What a step does with a rollout, by the ids of its completions."""

    group_id: int
    rollout_id: int
    why: Untrained | None
    """Why it has no rows; None: it may have some."""
    completions: Mapping[int, TokenFate]

    def to_pool(self) -> RolloutFate:
        """Return the record that the pool stores, where what is excluded and what is masked are alike."""
        items = [
            CompletionFate(completion_id, tokens.trained, tokens.excluded + tokens.masked)
            for completion_id, tokens in self.completions.items()
        ]
        return RolloutFate(self.group_id, self.rollout_id, self.why, items)


@dataclass(frozen=True)
class _TrainedRollout:
    """A rollout's rows before normalisation."""

    group: int
    """The place of its group in the batch."""
    weight: float
    """How often it counts."""
    rows: list[TrainingRow]


def _total(counters: Iterable[Counter[Untrained]]) -> Counter[Untrained]:
    total: Counter[Untrained] = Counter()
    for counter in counters:
        total.update(counter)
    return total


@dataclass(frozen=True)
class TrainingBatch:
    """The rows that a step trains on, and what it leaves out."""

    minibatches: list[list[TrainingRow]]
    """The rows of each minibatch, with weights over its own tokens and rollouts. One, unless the loss has several."""
    fates: list[MemberFate]
    """Fate of each rollout of the step, with or without rows."""
    rewards: list[float]
    """Rewards of the members with a verdict, as the verifier gave them."""
    dropped_groups: int
    """Groups without rows: their rewards are equal, or too few members have one."""
    equal_groups: int
    """Of these, the groups without a difference to learn from: rewards are equal, and process rewards too."""
    unplaced_rewards: int = 0
    """Process rewards that name no turn of their rollout."""
    scales: dict[str, Any] | None = None
    """The running deviations by domain with those of this step, which later steps divide by; None: they do not."""

    @cached_property
    def excluded(self) -> Counter[Untrained]:
        """Tokens of answers that are in no row as trained, by reason."""
        return _total(tokens.excluded for fate in self.fates for tokens in fate.completions.values())

    @cached_property
    def masked(self) -> Counter[Untrained]:
        """Trained tokens whose advantage is set to 0, by reason. They count in every denominator."""
        return _total(tokens.masked for fate in self.fates for tokens in fate.completions.values())

    @cached_property
    def rows(self) -> list[TrainingRow]:
        """The rows of all minibatches."""
        return [row for rows in self.minibatches for row in rows]

    @property
    def tokens(self) -> int:
        """Number of trained tokens."""
        return trained_tokens(self.rows)


def trained_tokens(rows: Iterable[TrainingRow]) -> int:
    """Number of trained tokens: the flat denominator of the loss."""
    return sum(int(row.trained.sum()) for row in rows)


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

    Imitation needs no logprobs, but only takes replies that ended by themselves and that the agent received.
    """
    if item.untrainable is not None and item.untrainable.reason == UntrainedReason.ABANDONED:
        return item.untrainable
    if item.label is not None and item.label not in labels:
        return Untrained(UntrainedReason.LABEL, item.label)
    finished = item.finish_reason in ("stop", "tool_calls")
    return None if finished else Untrained(UntrainedReason.UNFINISHED, item.finish_reason)


def assemble(groups: Sequence[LeasedGroup], options: StepOptions, cost: Cost = inputs) -> TrainingBatch:
    """The rows of a step's groups, with their advantages and weights.

    Advantages are over the whole batch, whatever minibatch their group is in. `cost`: of a group's rows, by which
    groups are divided (trainer/data/packing.py). UserError when experts are to be replayed and none were recorded.
    """
    why_not = partial(why_not_trainable, labels=options.labels, max_tokens=options.max_tokens)
    rollouts: list[_TrainedRollout] = []
    fates: list[MemberFate] = []
    credits = assign.group_credits(groups, options)
    for place, (group, credit) in enumerate(zip(groups, credits, strict=True)):
        for member, advantages in zip(group.rollouts, credit.members, strict=True):
            own = {item.id: TokenFate() for item in member.completions}
            why = None
            if advantages is None:
                why = member.untrained or credit.dropped or Untrained(UntrainedReason.NO_REWARD)
                for item in member.completions:
                    _exclude(item, why, own)
            else:
                rows = _merged(member.completions, advantages, own, why_not, options.mixture)
                masked = _masked(rows, member, options, own)
                rollouts.append(_TrainedRollout(place, credit.weight * member.weight, masked))
            fates.append(MemberFate(group.group_id, member.rollout_id, why, own))
    if options.mixture is not None:
        demand_recorded([row for rollout in rollouts for row in rollout.rows])
    members = (member for group in groups for member in group.rollouts)
    return TrainingBatch(
        minibatches=[_weighed(some, options.loss) for some in _divided(rollouts, options.loss, cost)],
        fates=fates,
        rewards=[member.verdict for member in members if member.verdict is not None],
        dropped_groups=sum(credit.dropped is not None for credit in credits),
        equal_groups=sum(credit.dropped == assign.EQUAL for credit in credits),
        unplaced_rewards=sum(credit.unplaced for credit in credits),
        scales=assign.scales_after(groups, credits, options),
    )


def _masked(
    rows: list[TrainingRow], member: LeasedRollout, options: StepOptions, fates: Mapping[int, TokenFate]
) -> list[TrainingRow]:
    """The rows of a rollout, with advantage 0 where they must not teach. Their tokens stay in every count.

    A rollout that is masked as a whole has weight 0 in all terms of the policy's loss. Masked negatives keep the terms
    without an advantage (KL). Completes `fates`.
    """
    reason = _why_masked(member, options)
    trained = sum(int(row.trained.sum()) for row in rows)
    factor = 0.0 if reason else options.loss.negatives().factor(-1.0, trained, options.step)
    masked_rows = []
    for row in rows:
        changed = np.ones_like(row.trained) if reason else row.advantage < 0
        masked = changed & row.trained & (factor == 0)
        by_part = (np.bincount(row.segment[some], minlength=len(row.completions)) for some in (row.trained, masked))
        for completion_id, count, less in zip(row.completions, *map(np.ndarray.tolist, by_part), strict=True):
            fates[completion_id].trained += count - less
            if less:
                fates[completion_id].masked[reason or NEGATIVE] += less
        advantage = np.where(changed, row.advantage * np.float32(factor), row.advantage)
        masked_rows.append(replace(row, advantage=advantage, weight=0.0 if reason else row.weight))
    return masked_rows


def _why_masked(member: LeasedRollout, options: StepOptions) -> Untrained | None:
    """Why a rollout must not teach although its reward is in the baseline."""
    if options.max_staleness is not None and member.staleness > options.max_staleness:
        return Untrained(UntrainedReason.STALE)
    if member.failure in (masked_failures := options.credit.masked_failures):
        return Untrained(masked_failures[member.failure])
    turns = assign.turns_of(member, options.labels)
    truncated = "truncated" in options.credit.mask and turns and turns[-1].finish_reason in CUT_FINISH_REASONS
    return Untrained(UntrainedReason.TRUNCATED) if truncated else None


def _divided(rollouts: Sequence[_TrainedRollout], loss: Loss, cost: Cost) -> list[list[_TrainedRollout]]:
    """The rollouts of each minibatch, in the batch's order."""
    by_group: dict[int, list[TrainingRow]] = {}
    for rollout in rollouts:
        by_group.setdefault(rollout.group, []).extend(rollout.rows)
    other_terms = bool(loss.kl or loss.balance)
    teaching = [any(teaches(row, other_terms) for row in rows) for rows in by_group.values()]
    costs = [cost(rows) if loss.minibatches > 1 else 0.0 for rows in by_group.values()]
    groups = list(by_group)
    return [
        [rollout for rollout in rollouts if rollout.group in {groups[place] for place in places}]
        for places in by_minibatch(costs, teaching, loss.minibatches)
    ]


def _weighed(rollouts: Sequence[_TrainedRollout], loss: Loss) -> list[TrainingRow]:
    """All rows with their weights: the loss's normalisation, relative to the mean over all trained tokens."""
    rows = [row for rollout in rollouts for row in rollout.rows]
    counts = [int(row.trained.sum()) for row in rows]
    owners = [index for index, rollout in enumerate(rollouts) for _ in rollout.rows]
    copies = [rollouts[owner].weight for owner in owners]
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
    fates = {item.id: TokenFate() for item in chain}
    rows = _merged(chain, advantage, fates, why_not, mixture)
    excluded.update(_total(tokens.excluded for tokens in fates.values()))
    return rows


def _merged(
    chain: Sequence[Completion],
    advantage: float | Mapping[int, float],
    fates: Mapping[int, TokenFate],
    why_not: Callable[[Completion], Untrained | None],
    mixture: ExpertShape | None,
) -> list[TrainingRow]:
    """The rows of one attempt's completions. Adds to `fates` what they leave out."""
    try:
        path_of = paths(chain)
    except ValueError:
        for item in chain:
            _exclude(item, Untrained(UntrainedReason.CHECKSUM), fates)
        return []
    growing: list[_GrowingRow] = []
    recorded = None if mixture is None else RecordedExperts(chain, mixture)
    for item in chain:
        reason = why_not(item)
        if reason is not None:
            _exclude(item, reason, fates)
            continue
        _exclude_given(item, fates)
        if item.sampled_count:
            draft = _continued(growing, path_of[item.id], item, recorded)
            draft.tokens = path_of[item.id]
            draft.parts.append(item)
    rows = [_row(draft, advantage, fates) for draft in growing]
    if recorded is None:
        return rows
    return [replace(row, experts=recorded.along(draft.parts[-1].id)) for row, draft in zip(rows, growing, strict=True)]


def _exclude(item: Completion, why: Untrained, fates: Mapping[int, TokenFate]) -> None:
    if item.sampled_count:
        fates[item.id].excluded[why] += item.sampled_count
    _exclude_given(item, fates)


def _exclude_given(item: Completion, fates: Mapping[int, TokenFate]) -> None:
    if item.given and not item.replayed:
        fates[item.id].excluded[Untrained(UntrainedReason.GIVEN)] += item.given_count


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


def _row(draft: _GrowingRow, advantage: float | Mapping[int, float], fates: Mapping[int, TokenFate]) -> TrainingRow:
    """The row of the completions that were merged. Adds to `fates` the tokens whose logprob is not finite."""
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
        for index, count in Counter(segment[impossible].tolist()).items():
            fates[draft.parts[index].id].excluded[Untrained(UntrainedReason.LOGPROB_NOT_FINITE)] += count
        trained &= ~impossible
    sampled_by = tuple(item.id for item in draft.parts)
    return TrainingRow(tokens, trained, np.where(trained, logp, 0), scores, segment, completions=sampled_by)
