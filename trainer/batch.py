"""From recorded completions to rows with advantages and weights.

Each completion is trained on exactly the context it was sampled in. Where a completion's prompt begins with the whole
path of an earlier one of its attempt (a history that only grew), both become one sequence: causal attention makes that
exact. Left out: sharing between branches or members of a group (trainer/tree.py), micro-batches (trainer/packing.py).
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from proxy.pool.completions import paths
from proxy.pool.records import Completion
from proxy.pool.schedule import LeasedGroup, LeasedRollout
from trainer import advantages, config
from trainer.normalise import token_scales
from trainer.rows import Row


@dataclass(frozen=True)
class Batch:
    """What a step trains on, and what it leaves out."""

    rows: list[Row]
    excluded: Counter[str]
    """Sampled tokens that are not trained, by reason."""
    rewards: list[float]
    """Rewards of the valid members, as the verifier gave them."""
    dropped_groups: int
    """Groups whose rewards do not differ."""
    masked: Counter[str]
    """Trained tokens whose loss weighs nothing, by reason; they stay in every denominator."""

    @property
    def tokens(self) -> int:
        """Trained tokens: the flat denominator of the loss."""
        return sum(int(row.trained.sum()) for row in self.rows)


def why_not_trainable(item: Completion, labels: Sequence[str] = config.TRAINED) -> str | None:
    """The reason why a completion takes no part in policy training, or None. One without a label does take part."""
    if item.untrainable is not None:
        return item.untrainable
    if item.label is not None and item.label not in labels:
        return f"label {item.label}"
    if len(item.logprobs) != len(item.sampled):
        return "logprobs are missing"
    return None


def why_not_imitable(item: Completion, labels: Sequence[str] = config.TRAINED) -> str | None:
    """The same for imitation, which needs no logprobs: only replies that came to their end."""
    if item.label is not None and item.label not in labels:
        return f"label {item.label}"
    return None if item.finish_reason in ("stop", "tool_calls") else f"finish reason {item.finish_reason}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a step does with its groups."""

    loss: config.Loss = config.Loss()
    control: config.Control = config.Control()
    labels: Sequence[str] = config.TRAINED
    """Completions with these labels are trained."""
    step: int = 1


def assemble(groups: Sequence[LeasedGroup], choice: Choice) -> Batch:
    """The rows of a step's groups, with their advantages and weights."""
    why_not = partial(why_not_trainable, labels=choice.labels)
    rollouts: list[list[Row]] = []
    excluded: Counter[str] = Counter()
    masked: Counter[str] = Counter()
    rewards: list[float] = []
    dropped = 0
    for group in groups:
        valid = [member.reward if member.failure is None else None for member in group.rollouts]
        rewards += [reward for reward in valid if reward is not None]
        control = choice.control
        used = advantages.shuffled(valid, control.seed + group.group_id) if control.shuffle_rewards else valid
        scores = advantages.group_relative(used, choice.loss.advantage)
        dropped += scores is None
        for index, member in enumerate(group.rollouts):
            score = scores[index] if scores is not None else None
            if score is None:
                excluded[_reason(member)] += sum(len(item.sampled) for item in member.completions)
            else:
                rows = merge(member.completions, score, excluded, why_not)
                rollouts.append(_tempered(rows, score, choice, masked))
    return Batch(_weighed(rollouts, choice.loss), excluded, rewards, dropped, masked)


def _tempered(rows: list[Row], score: float, choice: Choice, masked: Counter[str]) -> list[Row]:
    """The rows of a rollout, with what its negative advantage weighs. The weight 0 keeps the tokens in every count."""
    trained = sum(int(row.trained.sum()) for row in rows)
    factor = choice.loss.negatives().factor(score, trained, choice.step)
    if factor == 0:
        masked["negative advantage"] += trained
    return rows if factor == 1 else [replace(row, advantage=row.advantage * np.float32(factor)) for row in rows]


def _weighed(rollouts: Sequence[Sequence[Row]], loss: config.Loss) -> list[Row]:
    rows = [row for own in rollouts for row in own]
    counts = [int(row.trained.sum()) for row in rows]
    owners = [index for index, own in enumerate(rollouts) for _ in own]
    scales = token_scales(counts, owners, loss.norm, loss.norm_constant)
    return [replace(row, weight=scale * max(1, sum(counts))) for row, scale in zip(rows, scales, strict=True)]


def _reason(member: LeasedRollout) -> str:
    return f"rollout: {member.failure}" if member.failure is not None else "all rewards of the group are equal"


@dataclass
class _Draft:
    """A sequence that is still growing: its longest path, and the completions trained in it."""

    tokens: "array[int]"
    parts: list[Completion] = field(default_factory=list)


def merge(
    chain: Sequence[Completion],
    advantage: float,
    excluded: Counter[str],
    why_not: Callable[[Completion], str | None],
) -> list[Row]:
    """The sequences of one attempt's completions (in commit order); adds to `excluded` what they leave out."""
    try:
        whole = paths(chain)
    except ValueError:
        excluded["stored tokens do not match their checksum"] += sum(len(item.sampled) for item in chain)
        return []
    drafts: list[_Draft] = []
    for item in chain:
        reason = why_not(item)
        if reason is not None:
            excluded[reason] += len(item.sampled)
        elif len(item.sampled):
            draft = _continued(drafts, whole[item.id], item.prompt_length)
            draft.tokens = whole[item.id]
            draft.parts.append(item)
    return [_row(draft, advantage, excluded) for draft in drafts]


def _continued(drafts: list[_Draft], path: "array[int]", prompt_length: int) -> _Draft:
    """The longest sequence that the prompt begins with, or a new one."""
    for draft in sorted(drafts, key=lambda draft: -len(draft.tokens)):
        if len(draft.tokens) <= prompt_length and path[: len(draft.tokens)] == draft.tokens:
            return draft
    drafts.append(_Draft(array("i")))
    return drafts[-1]


def _row(draft: _Draft, advantage: float, excluded: Counter[str]) -> Row:
    tokens = np.array(draft.tokens, dtype=np.int64)
    trained = np.zeros(len(tokens), dtype=bool)
    logp = np.zeros(len(tokens), dtype=np.float32)
    segment = np.zeros(len(tokens), dtype=np.int64)
    for index, item in enumerate(draft.parts):
        place = slice(item.prompt_length, item.prompt_length + len(item.sampled))
        trained[place], segment[place] = True, index
        if len(item.logprobs) == len(item.sampled):
            logp[place] = item.logprobs
    impossible = trained & ~np.isfinite(logp)
    impossible[0] |= trained[0]  # the first token of all has no context to be predicted from
    if impossible.any():
        excluded["logprob is not finite"] += int(impossible.sum())
        trained &= ~impossible
    scores = np.full(len(tokens), advantage, dtype=np.float32)
    return Row(tokens, trained, np.where(trained, logp, 0), scores, segment)
