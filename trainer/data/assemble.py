"""From recorded completions to rows with advantages and weights.

Each completion is trained on exactly the context it was sampled in. Where a completion's prompt begins with the whole
path of an earlier one of its attempt (a history that only grew), both become one sequence: causal attention makes that
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
from trainer import config
from trainer.config.estimators import Estimator
from trainer.config.model_shape import Experts
from trainer.credit import assign
from trainer.credit.token_weights import token_scales
from trainer.data.routed_experts import Recorded, demand_recorded
from trainer.data.row import Row

NEGATIVE = Untrained(UntrainedReason.NEGATIVE_ADVANTAGE)


@dataclass(frozen=True)
class Batch:
    """What a step trains on, and what it leaves out."""

    rows: list[Row]
    excluded: Counter[Untrained]
    """Sampled tokens that are not trained, by reason."""
    rewards: list[float]
    """Rewards of the valid members, as the verifier gave them."""
    dropped_groups: int
    """Groups that teach nothing: their rewards do not differ, or too few members have one."""
    masked: Counter[Untrained]
    """Trained tokens whose advantage weighs nothing, by reason; they stay in every denominator."""
    unplaced_rewards: int = 0
    """Process rewards that name no turn of their rollout."""

    @property
    def tokens(self) -> int:
        """Trained tokens: the flat denominator of the loss."""
        return sum(int(row.trained.sum()) for row in self.rows)


def why_not_trainable(item: Completion, labels: Sequence[str] = config.TRAINED) -> Untrained | None:
    """The reason why a completion takes no part in policy training, or None. One without a label does take part."""
    if item.untrainable is not None:
        return item.untrainable
    if item.label is not None and item.label not in labels:
        return Untrained(UntrainedReason.LABEL, item.label)
    if len(item.logprobs) != len(item.sampled):
        return Untrained(UntrainedReason.LOGPROBS_MISSING)
    return None


def why_not_imitable(item: Completion, labels: Sequence[str] = config.TRAINED) -> Untrained | None:
    """The same for imitation, which needs no logprobs: only replies that came to their end."""
    if item.label is not None and item.label not in labels:
        return Untrained(UntrainedReason.LABEL, item.label)
    finished = item.finish_reason in ("stop", "tool_calls")
    return None if finished else Untrained(UntrainedReason.UNFINISHED, item.finish_reason)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a step does with its groups."""

    loss: config.Loss = config.Loss()
    credit: config.Credit = config.Credit()
    control: config.Control = config.Control()
    labels: Sequence[str] = config.TRAINED
    """Completions with these labels are trained."""
    max_staleness: int | None = None
    """Rollouts whose oldest token lags further behind are left out of the loss. None: none is."""
    mixture: Experts | None = None
    """Replay what the engine chose from this one. None: the trainer's routers choose."""
    step: int = 1

    @property
    def estimator(self) -> Estimator:
        return self.loss.advantage


def choice_of(settings: config.Config, step: int, mixture: Experts | None = None) -> Choice:
    """What the configuration says about a step.

    `mixture`: the routing that is replayed (trainer/data/routed_experts.py: replayed)."""
    return Choice(
        loss=settings.loss,
        credit=settings.credit,
        control=settings.control,
        labels=settings.batch.labels,
        max_staleness=settings.batch.max_staleness,
        mixture=mixture,
        step=step,
    )


def assemble(groups: Sequence[LeasedGroup], choice: Choice) -> Batch:
    """The rows of a step's groups, with their advantages and weights."""
    why_not = partial(why_not_trainable, labels=choice.labels)
    rollouts: list[list[Row]] = []
    weights: list[float] = []
    excluded: Counter[Untrained] = Counter()
    masked: Counter[Untrained] = Counter()
    shares = assign.shares(groups, choice)
    for group, share in zip(groups, shares, strict=True):
        for member, turns in zip(group.rollouts, share.members, strict=True):
            if turns is None:
                reason = member.untrained or share.dropped or Untrained(UntrainedReason.NO_REWARD)
                excluded[reason] += sum(len(item.sampled) for item in member.completions)
            else:
                rows = merge(member.completions, turns, excluded, why_not, mixture=choice.mixture)
                rollouts.append(_masked(rows, member, choice, masked))
                weights.append(share.weight)
    if choice.mixture is not None:
        demand_recorded([row for own in rollouts for row in own])
    members = (member for group in groups for member in group.rollouts)
    return Batch(
        rows=_weighed(rollouts, weights, choice.loss),
        excluded=excluded,
        rewards=[member.verdict for member in members if member.verdict is not None],
        dropped_groups=sum(share.dropped is not None for share in shares),
        masked=masked,
        unplaced_rewards=sum(share.unplaced for share in shares),
    )


def _masked(rows: list[Row], member: LeasedRollout, choice: Choice, masked: Counter[Untrained]) -> list[Row]:
    """The rows of a rollout, with advantage 0 where they must not teach. That keeps the tokens in every count.

    What is masked as a whole weighs nothing in any term of the policy's loss; masked negatives keep the terms that no
    advantage enters (KL).
    """
    reason = _why_masked(member, choice)
    trained = sum(int(row.trained.sum()) for row in rows)
    factor = 0.0 if reason else choice.loss.negatives().factor(-1.0, trained, choice.step)
    found = []
    for row in rows:
        touched = np.ones_like(row.trained) if reason else row.advantage < 0
        if factor == 0:
            masked[reason or NEGATIVE] += int((touched & row.trained).sum())
        advantage = np.where(touched, row.advantage * np.float32(factor), row.advantage)
        found.append(replace(row, advantage=advantage, weight=0.0 if reason else row.weight))
    return found


def _why_masked(member: LeasedRollout, choice: Choice) -> Untrained | None:
    """Why a rollout is left out of the loss although its reward is in the baseline."""
    if choice.max_staleness is not None and member.staleness > choice.max_staleness:
        return Untrained(UntrainedReason.STALE)
    turns = assign.turns_of(member, choice.labels)
    cut = choice.credit.mask_truncated and turns and turns[-1].finish_reason == "length"
    return Untrained(UntrainedReason.TRUNCATED) if cut else None


def _weighed(rollouts: Sequence[Sequence[Row]], weights: Sequence[float], loss: config.Loss) -> list[Row]:
    rows = [row for own in rollouts for row in own]
    counts = [int(row.trained.sum()) for row in rows]
    owners = [index for index, own in enumerate(rollouts) for _ in own]
    copies = [weights[owner] for owner in owners]
    scales = token_scales(counts, owners, loss.norm, loss.norm_constant, weights=copies)
    whole = max(1, sum(counts))
    return [replace(row, weight=row.weight * scale * whole) for row, scale in zip(rows, scales, strict=True)]


@dataclass
class _Draft:
    """A sequence that is still growing: its longest path, and the completions trained in it."""

    tokens: "array[int]"
    parts: list[Completion] = field(default_factory=list)


def merge(
    chain: Sequence[Completion],
    advantage: float | Mapping[int, float],
    excluded: Counter[Untrained],
    why_not: Callable[[Completion], Untrained | None],
    *,
    mixture: Experts | None = None,
) -> list[Row]:
    """The sequences of one attempt's completions (in commit order); adds to `excluded` what they leave out.

    `advantage`: of all sampled tokens, or of those of each completion by its id.
    `mixture`: replay what the engine chose from it.
    """
    try:
        whole = paths(chain)
    except ValueError:
        excluded[Untrained(UntrainedReason.CHECKSUM)] += sum(len(item.sampled) for item in chain)
        return []
    drafts: list[_Draft] = []
    chosen = None if mixture is None else Recorded(chain, mixture)
    for item in chain:
        reason = why_not(item)
        if reason is not None:
            excluded[reason] += len(item.sampled)
        elif len(item.sampled):
            draft = _continued(drafts, whole[item.id], item, chosen)
            draft.tokens = whole[item.id]
            draft.parts.append(item)
    rows = [_row(draft, advantage, excluded) for draft in drafts]
    if chosen is None:
        return rows
    return [replace(row, experts=chosen.along(draft.parts[-1].id)) for row, draft in zip(rows, drafts, strict=True)]


def _continued(drafts: list[_Draft], path: "array[int]", item: Completion, chosen: Recorded | None) -> _Draft:
    """The longest sequence that the prompt begins with, in what the engine chose too, or a new one."""
    for draft in sorted(drafts, key=lambda draft: -len(draft.tokens)):
        size = len(draft.tokens)
        if size <= item.prompt_length and path[:size] == draft.tokens:
            if chosen is None or chosen.goes_on(item.id, draft.parts[-1].id, size):
                return draft
    drafts.append(_Draft(array("i")))
    return drafts[-1]


def _row(draft: _Draft, advantage: float | Mapping[int, float], excluded: Counter[Untrained]) -> Row:
    tokens = np.array(draft.tokens, dtype=np.int64)
    trained = np.zeros(len(tokens), dtype=bool)
    logp = np.zeros(len(tokens), dtype=np.float32)
    segment = np.zeros(len(tokens), dtype=np.int64)
    scores = np.zeros(len(tokens), dtype=np.float32)
    for index, item in enumerate(draft.parts):
        place = slice(item.prompt_length, item.prompt_length + len(item.sampled))
        trained[place], segment[place] = True, index
        scores[place] = advantage if isinstance(advantage, float) else advantage[item.id]
        if len(item.logprobs) == len(item.sampled):
            logp[place] = item.logprobs
    impossible = trained & ~np.isfinite(logp)
    impossible[0] |= trained[0]  # the first token of all has no context to be predicted from
    if impossible.any():
        excluded[Untrained(UntrainedReason.LOGPROB_NOT_FINITE)] += int(impossible.sum())
        trained &= ~impossible
    sampled_by = tuple(item.id for item in draft.parts)
    return Row(tokens, trained, np.where(trained, logp, 0), scores, segment, completions=sampled_by)
