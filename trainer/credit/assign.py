"""What each turn of a group's rollouts is credited with: from verdicts to one advantage per model call.

In this order: members without a verdict go, then groups with too few members left, then groups whose rewards do not
differ (by the verifier's reward, whatever is added to it), then rewards are shaped, returns taken and compared with the
others'. A turn is a completion of the agent's work, in the order of commits. Left out: the formulas
(trainer/credit/advantages.py, trainer/credit/returns.py); what later keeps a rollout out of the loss
(trainer/data/assemble.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import stdev
from typing import Protocol

from proxy.pool.completions.records import Completion
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout
from proxy.pool.untrained import Untrained, UntrainedReason
from trainer.config import Control, Credit
from trainer.config.estimators import Estimator
from trainer.credit import returns as formulas
from trainer.credit.advantages import ZERO_VARIANCE, group_relative, padding_weight, shuffled
from trainer.credit.critical_path import critical_path

EQUAL = Untrained(UntrainedReason.EQUAL_REWARDS)
FEW = Untrained(UntrainedReason.TOO_FEW_VALID)
_TURN = re.compile(r"turn:(\d+)")


class Rule(Protocol):
    """What decides on credit (`trainer.data.assemble.Choice`)."""

    @property
    def credit(self) -> Credit: ...
    @property
    def estimator(self) -> Estimator: ...
    @property
    def control(self) -> Control: ...
    @property
    def labels(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Share:
    """What the members of a group are credited with."""

    members: list[Mapping[int, float] | None]
    """The advantage of each completion by its id; None for a member that takes no part."""
    weight: float = 1.0
    """Of each member's tokens: how many members it stands for."""
    dropped: Untrained | None = None
    """Why nobody takes part."""
    unplaced: int = 0
    """Process rewards that name no turn."""
    firsts: Sequence[float] = ()
    """The return of each valid member's first turn."""


@dataclass(frozen=True)
class _Played:
    """A member with a verdict: its turns and what each of them earned."""

    turns: list[Completion]
    places: list[int]
    process: list[float]
    outcome: float
    success: bool
    unplaced: int

    def returns(self, gamma: float) -> list[float]:
        """One per turn, and one for a rollout without turns: its reward still tells the others something."""
        rewards = self.process or [0.0]
        return formulas.reward_to_go([*rewards[:-1], rewards[-1] + self.outcome], gamma, self.places or [0])

    def by_id(self, values: Sequence[float]) -> dict[int, float]:
        return {turn.id: value for turn, value in zip(self.turns, values, strict=False)}


def shares(groups: Sequence[LeasedGroup], rule: Rule) -> list[Share]:
    """What each group's members are credited with."""
    found = [_share(group, rule) for group in groups]
    if rule.credit.by_turn and rule.credit.scale == "domain":
        return _scaled(groups, found)
    return found


def turns_of(member: LeasedRollout, labels: Sequence[str]) -> list[Completion]:
    """The completions of the agent's work; those of before labels count as such."""
    return [item for item in member.completions if item.label is None or item.label in labels]


def _share(group: LeasedGroup, rule: Rule) -> Share:
    verdicts = [member.verdict for member in group.rollouts]
    weight = padding_weight(sum(reward is not None for reward in verdicts), group.size or len(verdicts))
    control = rule.control
    rewards = shuffled(verdicts, control.seed + group.group_id) if control.shuffle_rewards else verdicts
    if weight is None or group_relative(rewards) is None:
        return Share([None] * len(verdicts), dropped=FEW if weight is None else EQUAL)
    played = _shaped(
        [
            None if reward is None else _played(member, reward, rule)
            for member, reward in zip(group.rollouts, rewards, strict=True)
        ],
        rule.credit,
    )
    credited = (_by_turn if rule.credit.by_turn else _by_outcome)(played, rule)
    if credited is None:
        return Share([None] * len(verdicts), dropped=EQUAL)
    valid = [one for one in played if one is not None]
    return Share(
        credited,
        weight if rule.credit.pad else 1.0,
        unplaced=sum(one.unplaced for one in valid),
        firsts=[one.returns(rule.credit.gamma)[0] for one in valid],
    )


def _played(member: LeasedRollout, reward: float, rule: Rule) -> _Played:
    """`turn:N` is the attempt's completion of ordinal N."""
    credit, turns = rule.credit, turns_of(member, rule.labels)
    given = {int(match[1]): value for name, value in member.parts.items() if (match := _TURN.fullmatch(name))}
    process = [credit.process_weight * max(-1.0, min(1.0, given.pop(turn.ordinal, 0.0))) for turn in turns]
    return _Played(
        turns=turns,
        places=formulas.places([turn.label == "subagent" for turn in turns]),
        process=formulas.within(process, credit.process_bound) if credit.by_turn else [0.0] * len(turns),
        outcome=reward,
        success=reward >= credit.success,
        unplaced=len(given) if credit.by_turn else 0,
    )


def _shaped(played: Sequence[_Played | None], credit: Credit) -> list[_Played | None]:
    """The same with what speed and length add to the outcome of the successful ones."""
    valid = [one for one in played if one is not None]
    times = [critical_path(one.turns, credit.tokens_per_second) if credit.speed_weight else 0.0 for one in valid]
    fast = formulas.speeds(times, [one.success for one in valid])
    added = iter(
        credit.speed_weight * speed + (_overlong(one, credit) if one.success else 0.0)
        for one, speed in zip(valid, fast, strict=True)
    )
    return [None if one is None else replace(one, outcome=one.outcome + next(added)) for one in played]


def _overlong(one: _Played, credit: Credit) -> float:
    if credit.overlong_limit is None:
        return 0.0
    return formulas.overlong(
        sum(len(turn.sampled) for turn in one.turns), credit.overlong_limit, credit.overlong_margin
    )


def _by_outcome(played: Sequence[_Played | None], rule: Rule) -> list[Mapping[int, float] | None] | None:
    """The rollout's advantage for each of its turns, discounted by the turns that were still to come."""
    scores = group_relative([None if one is None else one.outcome for one in played], rule.estimator)
    if scores is None:
        return None
    return [
        None if one is None or score is None else one.by_id(replace(one, outcome=score).returns(rule.credit.gamma))
        for one, score in zip(played, scores, strict=True)
    ]


def _by_turn(played: Sequence[_Played | None], rule: Rule) -> list[Mapping[int, float] | None] | None:
    """Each turn's return against the others'."""
    returns = [one.returns(rule.credit.gamma) for one in played if one is not None]
    compared: list[list[float]] | None = returns
    if rule.credit.baseline != "none":
        against_first = rule.credit.baseline == "first"
        compared = (formulas.leave_one_out if against_first else formulas.turn_aligned)(returns)
    if compared is None:
        return None
    values = iter(compared)
    return [None if one is None else one.by_id(next(values)) for one in played]


def _scaled(groups: Sequence[LeasedGroup], found: Sequence[Share]) -> list[Share]:
    """Divided by the deviation of first-turn returns over a domain: of a whole step, as few rollouts say little."""
    firsts: dict[str, list[float]] = {}
    for group, share in zip(groups, found, strict=True):
        firsts.setdefault(_domain(group), []).extend(share.firsts)
    scales = {domain: 1 / (stdev(values) + ZERO_VARIANCE) for domain, values in firsts.items() if len(values) > 1}
    return [
        replace(share, members=[_times(member, scales.get(_domain(group), 1.0)) for member in share.members])
        for group, share in zip(groups, found, strict=True)
    ]


def _times(member: Mapping[int, float] | None, scale: float) -> Mapping[int, float] | None:
    return None if member is None else {id: value * scale for id, value in member.items()}


def _domain(group: LeasedGroup) -> str:
    return str(group.task.get("domain", "agent"))
