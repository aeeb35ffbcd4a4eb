"""Figures of what rollouts did: calls and their failures, repeats, times, commands. They are added up over rollouts.

A rate of nothing is absent, never 0: the failures of calls whose results were not kept are not known.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from proxy.pool.behaviour.actions import actions, work_of
from proxy.pool.behaviour.event import Kind
from proxy.pool.behaviour.read import events
from proxy.pool.behaviour.results import failure
from proxy.pool.completions.records import Completion

REPEATS = (Kind.REPEATED_CALL, Kind.NEAR_REPEATED_CALL)


@dataclass
class ToolFigures:
    """Figures of the calls of one tool."""

    calls: int = 0
    known: int = 0
    """How many of these calls have a known result."""
    failed: int = 0
    repeated: int = 0


@dataclass
class Statistics:
    """Sums over rollouts."""

    rollouts: int = 0
    whole: int = 0
    """Of these, the rollouts whose turns and times are in the sums: figures of one tool have none."""
    rewards: int = 0
    reward_sum: float = 0.0
    turns: int = 0
    tools: dict[str, ToolFigures] = field(default_factory=dict)
    commands: Counter[str] = field(default_factory=Counter)
    """Calls by tool and head of the command."""
    events: Counter[str] = field(default_factory=Counter)
    reasoning: int = 0
    """Characters of reasoning, and all that the model wrote."""
    characters: int = 0
    edited: int = 0
    """Rollouts that wrote a file, and the sum of the turns up to their first one."""
    turns_to_edit: int = 0
    integrity_known: int = 0
    """Rollouts whose integrity was looked at, and those of them that cheated (harness/integrity)."""
    hacked: int = 0
    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    """Time between a call's answer and the next request of its conversation."""

    def merge(self, other: "Statistics") -> None:
        """Add the sums of other rollouts."""
        self.rollouts += other.rollouts
        self.whole += other.whole
        self.rewards += other.rewards
        self.reward_sum += other.reward_sum
        self.turns += other.turns
        self.reasoning += other.reasoning
        self.characters += other.characters
        self.edited += other.edited
        self.turns_to_edit += other.turns_to_edit
        self.integrity_known += other.integrity_known
        self.hacked += other.hacked
        self.model_seconds += other.model_seconds
        self.tool_seconds += other.tool_seconds
        self.commands.update(other.commands)
        self.events.update(other.events)
        for tool, figures in other.tools.items():
            own = self.tools.setdefault(tool, ToolFigures())
            own.calls += figures.calls
            own.known += figures.known
            own.failed += figures.failed
            own.repeated += figures.repeated

    def means(self) -> dict[str, float]:
        """Return means per rollout, and rates; those that are not known are left out."""
        calls = sum(tool.calls for tool in self.tools.values())
        known = sum(tool.known for tool in self.tools.values())
        rates = {
            "reward": (self.reward_sum, self.rewards),
            "turns": (self.turns, self.whole),
            "calls": (calls, self.rollouts),
            "failure_rate": (sum(tool.failed for tool in self.tools.values()), known),
            "repeat_rate": (sum(tool.repeated for tool in self.tools.values()), calls),
            "characters_per_turn": (self.characters, self.turns),
            "reasoning_share": (self.reasoning, self.characters),
            "turns_to_first_edit": (self.turns_to_edit, self.edited),
            "hacked": (self.hacked, self.integrity_known),
            "model_seconds": (self.model_seconds, self.whole),
            "tool_seconds": (self.tool_seconds, self.whole),
            "tool_time_share": (self.tool_seconds, self.tool_seconds + self.model_seconds),
        }
        return {name: part / whole for name, (part, whole) in rates.items() if whole}

    def events_per_rollout(self) -> dict[str, float]:
        """Return the mean number of each kind of event, without calls, which all have."""
        return {kind: count / self.rollouts for kind, count in self.events.most_common() if kind != Kind.TOOL_CALLED}


def own_work(chain: Sequence[Completion]) -> list[Completion]:
    """Return what a rollout's behaviour is read from, without the completions that it replays of a recorded one."""
    return work_of([item for item in chain if not item.replayed])


def of_rollout(chain: Sequence[Completion], reward: float | None, hacked: bool | None = None) -> Statistics:
    """Return the figures of one rollout, from its completions in commit order. `hacked`: None where nobody looked."""
    work = own_work(chain)
    judged = reward is not None
    figures = Statistics(rollouts=1, whole=1, rewards=int(judged), reward_sum=reward or 0.0, turns=len(work))
    figures.integrity_known, figures.hacked = int(hacked is not None), int(bool(hacked))
    done = actions(work)
    for number, item in enumerate(work, 1):
        reasoning = len(item.reply.get("reasoning_content") or "")
        figures.reasoning += reasoning
        figures.characters += reasoning + len(item.reply.get("content") or "")
        for action in done[item.id]:
            figures.characters += len(action.written)
            figures.commands[action.name] += 1
            tool = figures.tools.setdefault(action.tool, ToolFigures())
            tool.calls += 1
            tool.known += bool(action.result or action.fault)
            tool.failed += bool(action.fault or failure(action))
            if action.written_files and not figures.edited:
                figures.edited, figures.turns_to_edit = 1, number
    for event in events(work):
        figures.events[event.kind] += 1
        if event.kind in REPEATS:
            name = next(action.tool for action in done[event.completion] if action.call == event.call)
            figures.tools[name].repeated += 1
    figures.model_seconds = sum(item.finished_at - item.started_at - (item.queued_seconds or 0.0) for item in work)
    ended = {item.id: item.finished_at for item in work}
    figures.tool_seconds = sum(
        max(0.0, item.started_at - ended.get(item.follows or 0, item.started_at)) for item in work
    )
    return figures


def drift(counts: Mapping[str, float], before: Mapping[str, float]) -> float | None:
    """Return the Jensen-Shannon divergence of two histograms in bits, from 0 (alike) to 1; None: one is empty."""
    totals = sum(counts.values()), sum(before.values())
    if not all(totals):
        return None
    bits = 0.0
    for name in counts.keys() | before.keys():
        shares = counts.get(name, 0) / totals[0], before.get(name, 0) / totals[1]
        bits += sum(share * math.log2(2 * share / sum(shares)) for share in shares if share) / 2
    return max(0.0, bits)
