"""Process rewards: what each turn of a rollout earns besides the verdict, by its verifier and by its events.

The pool's scheduler and the trainer both decide by these functions whether a group of equal verdicts teaches something.
Left out: which turn's tokens get which advantage (trainer/credit).
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from proxy.pool.behaviour.actions import Readable, actions, work_of
from proxy.pool.behaviour.event import Event, Kind
from proxy.pool.behaviour.read import events
from proxy.pool.behaviour.results import failure
from proxy.pool.completions.records import Completion

PENALISED: dict[str, tuple[Kind, ...]] = {
    "tool_errors": (Kind.TOOL_FAILED, Kind.MALFORMED_CALL, Kind.UNKNOWN_TOOL),
    "language_mixing": (Kind.LANGUAGE_MIXING,),
    "retry_loops": (Kind.RETRY_LOOP,),
}
"""Forge's kinds (MiniMax-M2) -> the events that count. A call counts once for each, whatever is wrong with it."""
SAME = 1e-6
"""Rewards that differ by no more are equal: means and sums of the same parts may differ in their last digits."""
MANAGING = ("compact", "discard", "fold")
"""Tools by which an agent makes its context shorter, or spares it (docs/agents.md, "The project's own agent")."""

_TURN = re.compile(r"turn:(\d{1,9})", re.ASCII)


class TurnFigures(msgspec.Struct, frozen=True, array_like=True):
    """What process rewards need of one completion."""

    ordinal: int
    label: str | None
    counts: tuple[int, ...] = ()
    """The events of each of `PENALISED`, in its order; empty: none."""
    prompt_tokens: int = 0
    """Length of its prompt; 0 in figures that were stored before it was needed."""
    manages: bool = False
    """Whether it calls one of `MANAGING`, and the call was not refused."""


@dataclass(frozen=True, kw_only=True)
class ProcessRule:
    """How process rewards are made: the section [credit] of the trainer's configuration."""

    labels: Sequence[str]
    """The labels of the completions that are turns; completions without a label are, too."""
    factor: float
    """What every process reward is multiplied by."""
    bound: float
    """Upper bound of the sum of a rollout's process rewards, without their signs."""
    penalties: Mapping[str, float]
    """What each event of `PENALISED` costs."""
    full_context: float = 0.0
    """What a turn of the main work costs whose prompt is longer than `full_context_tokens`, unless it manages it."""
    full_context_tokens: int = 0

    @property
    def needs_events(self) -> bool:
        return any(self.penalties.values())

    @property
    def without_length(self) -> "ProcessRule":
        """The same without the cost of long prompts, for `differ`: length alone keeps no group of equal rewards."""
        return replace(self, full_context=0.0)


def figures(chain: Sequence[Completion], counted: bool = True) -> list[TurnFigures]:
    """Return the figures of an attempt's completions, which are in the order of their commits; of replayed ones none.

    `counted=False` leaves the events out, for a rule that does not need them.
    """
    counts, managing = penalised(chain) if counted else {}, _managing(chain)
    return [
        TurnFigures(item.ordinal, item.label, counts.get(item.id, ()), item.prompt_length, item.id in managing)
        for item in chain
        if not item.replayed
    ]


def _managing(chain: Sequence[Completion]) -> set[int]:
    """The completions with a call of `MANAGING` that says something, fits its tool, and is not known to have failed."""
    calls = (action for some in actions(work_of(chain)).values() for action in some if action.tool in MANAGING)
    return {
        action.completion
        for action in calls
        if not (action.fault or failure(action))
        and any(str(value).strip() for value in (action.arguments or {}).values())
    }


def penalised(chain: Sequence[Readable]) -> dict[int, tuple[int, ...]]:
    """Count the events of each of `PENALISED` by completion; completions without any are left out."""
    by_completion: dict[int, list[Event]] = {}
    for event in events(chain):
        by_completion.setdefault(event.completion, []).append(event)
    counts = {id: tuple(_count(some, kinds) for kinds in PENALISED.values()) for id, some in by_completion.items()}
    return {id: some for id, some in counts.items() if any(some)}


def _count(some: Iterable[Event], kinds: Sequence[Kind]) -> int:
    return len({(event.call, event.name if event.call is None else "") for event in some if event.kind in kinds})


def turn_rewards(
    attempt: Sequence[TurnFigures], parts: Mapping[str, Any], rule: ProcessRule
) -> tuple[list[float], int]:
    """Return the process reward of each turn, and how many of the verifier's `parts` name no turn.

    The part `turn:N` belongs to the completion with ordinal N. What a turn earns and what its events cost are added up
    and limited to [-1, 1]; larger sums over the rollout are scaled down to the rule's bound.
    """
    named = {int(match[1]): value for name, value in parts.items() if (match := _TURN.fullmatch(name))}
    rewards = []
    for turn in attempt:
        if turn.label is None or turn.label in rule.labels:
            costs = (rule.penalties.get(name, 0.0) * count for name, count in zip(PENALISED, turn.counts, strict=False))
            full = turn.label == "main" and turn.prompt_tokens > rule.full_context_tokens and not turn.manages
            earned = named.pop(turn.ordinal, 0.0) - sum(costs) - rule.full_context * full
            rewards.append(rule.factor * max(-1.0, min(1.0, earned)))
    return within(rewards, rule.bound), len(named)


def within(rewards: Sequence[float], bound: float) -> list[float]:
    """The process rewards of a rollout, scaled down if the sum of their absolute values exceeds `bound`."""
    size = sum(abs(reward) for reward in rewards)
    return [reward * bound / size for reward in rewards] if size > bound else list(rewards)


def equal_rewards(rewards: Collection[float]) -> bool:
    """Whether rewards count as equal: the trainer drops such a group, and `batch.refill` skips it."""
    return max(rewards) - min(rewards) <= SAME


def differ(rollouts: Iterable[Sequence[float]]) -> bool:
    """Whether rollouts have different process rewards: other turns earn some, or as many earn another one.

    The rewards are those of the rule `without_length`, and the number of turns that earn nothing does not count, so
    length alone makes no difference.
    """
    earned = {
        tuple((turn, round(reward, 6)) for turn, reward in enumerate(rewards) if abs(reward) > SAME)
        for rewards in rollouts
    }
    return len(earned) > 1
