"""Give each turn of a group's rollouts its credit: from verdicts to one advantage per model call.

The order: members without a verdict are left out; then groups with too few members left; then groups whose verdicts and
process rewards are equal (before speed and length add anything), unless returns are compared with nothing and some
reward is not 0. Then rewards are shaped, returns computed, and compared with the other rollouts'. A turn is a
completion of the agent's work, in commit order. Left out: the formulas (trainer/credit/advantages.py,
trainer/credit/returns.py); what later sets advantages to 0 (trainer/data/assemble.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from proxy.pool.behaviour.process import differ, figures, turn_rewards
from proxy.pool.completions.records import Completion
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout
from proxy.pool.untrained import Untrained, UntrainedReason
from trainer.config.credit import Credit
from trainer.config.step import StepOptions
from trainer.credit import returns as formulas
from trainer.credit.advantages import group_relative, padding_weight, shuffled
from trainer.credit.critical_path import critical_path
from trainer.credit.scales import added, deviations

EQUAL = Untrained(UntrainedReason.EQUAL_REWARDS)
FEW = Untrained(UntrainedReason.TOO_FEW_VALID)
_Advantages = list[Mapping[int, float] | None] | None


@dataclass(frozen=True)
class GroupCredit:
    """The credit of a group's members."""

    members: list[Mapping[int, float] | None]
    """Advantages of each member's completions, by id; None for a member that is left out."""
    weight: float = 1.0
    """The weight of each member's tokens: the number of members that it stands for."""
    dropped: Untrained | None = None
    """Why all members are left out. None: they are not."""
    unplaced: int = 0
    """Process rewards that name no turn."""
    firsts: Sequence[float] = ()
    """The return of each valid member's first turn; empty for a dropped group, which so lowers no deviation."""


@dataclass(frozen=True)
class _RewardedRollout:
    """A rollout with a verdict: its turns, and what each of them earned."""

    turns: list[Completion]
    places: list[int]
    """The place of each turn (`returns.places`)."""
    process: list[float]
    """The process reward of each turn, weighted."""
    lasting: list[float]
    """The same without the cost of long prompts: what may keep a group of equal verdicts."""
    outcome: float
    """The verifier's reward, plus what shaping adds."""
    success: bool
    unplaced: int
    seconds: float
    """Its duration, where speed counts; 0: it does not."""

    def returns(self, gamma: float) -> list[float]:
        """The return of each turn. A rollout without turns has one: its reward still counts in the baseline."""
        rewards = self.process or [0.0]
        return formulas.reward_to_go([*rewards[:-1], rewards[-1] + self.outcome], gamma, self.places or [0])

    def by_id(self, values: Sequence[float]) -> dict[int, float]:
        """One value per turn, by the completion's id."""
        return {turn.id: value for turn, value in zip(self.turns, values, strict=False)}


def group_credits(groups: Sequence[LeasedGroup], options: StepOptions) -> list[GroupCredit]:
    """The credit of each group."""
    credits = [_group_credit(group, options) for group in groups]
    return _scaled(groups, credits, deviations(options.scales)) if options.credit.by_domain else credits


def turns_of(member: LeasedRollout, labels: Sequence[str]) -> list[Completion]:
    """The completions of the agent's work that were sampled: a rollout that begins with a recorded one has its first
    turn behind that. Rows written before labels existed count as work."""
    sampled = (item for item in member.completions if not item.replayed)
    return [item for item in sampled if item.label is None or item.label in labels]


def _group_credit(group: LeasedGroup, options: StepOptions) -> GroupCredit:
    """The credit of one group, before scaling by domain."""
    verdicts = [member.verdict for member in group.rollouts]
    weight = padding_weight(sum(reward is not None for reward in verdicts), group.size or len(verdicts))
    rewards = shuffled(verdicts, group.group_id) if options.credit.shuffle_rewards else verdicts
    if weight is None:
        return GroupCredit([None] * len(verdicts), dropped=FEW)
    # Between two steps of a task stand its verifier and the next set-up, and nothing says how long they took.
    timed = bool(options.credit.speed_weight) and not group.task.get("steps")
    members = [
        None if reward is None else _rewarded_rollout(member, reward, options, timed)
        for member, reward in zip(group.rollouts, rewards, strict=True)
    ]
    verdicted = [one for one in members if one is not None]
    equal = group_relative(rewards) is None and not differ(one.lasting for one in verdicted)
    earned = any(one.outcome or any(one.lasting) for one in verdicted)
    if equal and not (options.credit.absolute and earned):
        return GroupCredit([None] * len(verdicts), dropped=EQUAL)
    rollouts = _shaped(members, options.credit)
    advantages = (_by_turn if options.credit.by_turn else _by_outcome)(rollouts, options)
    if advantages is None:
        return GroupCredit([None] * len(verdicts), dropped=EQUAL)
    valid = [one for one in rollouts if one is not None]
    return GroupCredit(
        advantages,
        weight,
        unplaced=sum(one.unplaced for one in valid),
        firsts=[one.returns(options.credit.gamma)[0] for one in valid],
    )


def _rewarded_rollout(member: LeasedRollout, reward: float, options: StepOptions, timed: bool) -> _RewardedRollout:
    """A rollout with its reward, and the process rewards of its turns where they count. `timed`: speed counts."""
    credit, turns = options.credit, turns_of(member, options.labels)
    unplaced, rule = 0, credit.process_rule(options.labels)
    process = lasting = [0.0] * len(turns)
    if rule is not None:
        own = figures(member.completions, rule.needs_events)
        process, unplaced = turn_rewards(own, member.parts, rule)
        lasting, _ = turn_rewards(own, member.parts, rule.without_length)
    return _RewardedRollout(
        turns=turns,
        places=formulas.places([turn.label == "subagent" for turn in turns]),
        process=process,
        lasting=lasting,
        outcome=reward,
        success=reward >= credit.SUCCESS,
        unplaced=unplaced,
        seconds=(
            critical_path(
                [item for item in member.completions if not item.replayed],
                credit.TOKENS_PER_SECOND,
                member.failed_calls,
            )
            if timed
            else 0.0
        ),
    )


def _shaped(rollouts: Sequence[_RewardedRollout | None], credit: Credit) -> list[_RewardedRollout | None]:
    """The rollouts with what speed and length add to the outcome of the successful ones."""
    valid = [one for one in rollouts if one is not None]
    speeds = formulas.speeds([one.seconds for one in valid], [one.success for one in valid])
    shaped = []
    for one, speed in zip(valid, speeds, strict=True):
        bonus = credit.speed_weight * speed
        if one.success and credit.overlong_limit is not None:
            length = sum(turn.sampled_count for turn in one.turns)
            bonus += formulas.overlong(length, credit.overlong_limit, credit.overlong_margin)
        shaped.append(replace(one, outcome=one.outcome + bonus))
    remaining = iter(shaped)
    return [None if one is None else next(remaining) for one in rollouts]


def _by_outcome(rollouts: Sequence[_RewardedRollout | None], options: StepOptions) -> _Advantages:
    """Give each turn the rollout's advantage, discounted by the turns after it. None when outcomes are equal."""
    scores = group_relative([None if one is None else one.outcome for one in rollouts], options.loss.advantage)
    if scores is None:
        return None
    return [
        None if one is None or score is None else one.by_id(replace(one, outcome=score).returns(options.credit.gamma))
        for one, score in zip(rollouts, scores, strict=True)
    ]


def _by_turn(rollouts: Sequence[_RewardedRollout | None], options: StepOptions) -> _Advantages:
    """Give each turn its return, compared with the other rollouts'. None when only one rollout is valid."""
    returns = [one.returns(options.credit.gamma) for one in rollouts if one is not None]
    compared: list[list[float]] | None = returns
    if options.credit.baseline != "none":
        against_first = options.credit.baseline == "first"
        compared = (formulas.leave_one_out if against_first else formulas.turn_aligned)(returns)
    if compared is None:
        return None
    values = iter(compared)
    return [None if one is None else one.by_id(next(values)) for one in rollouts]


def _scaled(
    groups: Sequence[LeasedGroup], credits: Sequence[GroupCredit], by_domain: Mapping[str, float]
) -> list[GroupCredit]:
    """Divide advantages by the deviation of first-turn returns over their domain, where it is known."""
    scaled = []
    for group, credit in zip(groups, credits, strict=True):
        deviation = by_domain.get(_domain(group), 1.0)
        members = [member and {id: value / deviation for id, value in member.items()} for member in credit.members]
        scaled.append(replace(credit, members=members))
    return scaled


def scales_after(
    groups: Sequence[LeasedGroup], credits: Sequence[GroupCredit], options: StepOptions
) -> dict[str, Any] | None:
    """The running deviations with those of the step; None where the step does not scale."""
    if not options.credit.by_domain:
        return None
    firsts: dict[str, list[Sequence[float]]] = {}
    for group, credit in zip(groups, credits, strict=True):
        firsts.setdefault(_domain(group), []).append(credit.firsts)
    return added(options.scales, firsts)


def _domain(group: LeasedGroup) -> str:
    """The domain of a group's task; tasks without one are of `agent`."""
    return str(group.task.get("domain", "agent"))
