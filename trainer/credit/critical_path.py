"""The duration of a rollout along its critical path, in seconds that do not depend on the load of the machines.

Left out: time before the first model call and after the last one, side calls, and waiting for an engine that failed.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.pool.completions.labels import SIDE, SUBAGENT
from proxy.pool.completions.records import SERVED_FINISH_REASONS, Completion

Span = tuple[float, float]
"""A begin and an end in unix seconds."""


def critical_path(
    calls: Sequence[Completion], tokens_per_second: float, failed_calls: Iterable[Sequence[float]] = ()
) -> float:
    """Seconds along the longest chain of model calls: tokens at `tokens_per_second`, plus the time of tools between
    calls.

    A call follows the one that ended last before it began; the time between the two is the tools', as measured. Calls
    that overlap are in different chains, and the longer chain counts, so sub-agents that run side by side make it
    shorter. A sub-agent's call follows its own conversation, and their parent goes on from the longest of them,
    whichever the engine was done with last. Side calls have no tokens here, and the time that they take is not the
    tools'. Neither is the time from the beginning of a call that broke off to the next call. `failed_calls`: begin and
    end of calls without a row.
    """
    work = sorted((call for call in calls if _is_work(call)), key=lambda call: call.started_at)
    begins = [call.started_at for call in work]
    broken = [(call.started_at, call.finished_at) for call in calls if call.finish_reason not in SERVED_FINISH_REASONS]
    broken += [(begin, end) for begin, end in failed_calls]
    waits = _joined(
        [(call.started_at, call.finished_at) for call in calls if call.label == SIDE]
        + [(begin, next(iter(begins[bisect_left(begins, end) :]), end)) for begin, end in broken]
    )
    chains: list[_Chain] = []
    for call in work:
        end, length = _before(call, [chain for chain in chains if chain.call.finished_at <= call.started_at])
        length += call.started_at - end - _overlap(waits, (end, call.started_at))
        chains.append(_Chain(call, length + call.sampled_count / tokens_per_second))
    return max((chain.length for chain in chains), default=0.0)


@dataclass(frozen=True)
class _Chain:
    """A call, and the length of its chain up to its end in seconds."""

    call: Completion
    length: float


def _before(call: Completion, ended: Sequence[_Chain]) -> tuple[float, float]:
    """When the calls ended that a call follows, of those that had ended when it began, and the length up to there."""
    if not ended:
        return call.started_at, 0.0
    last = max(ended, key=lambda chain: (chain.call.finished_at, chain.length))
    if call.label == SUBAGENT:
        last = next((chain for chain in ended if chain.call.id == call.follows), last)
    elif last.call.label == SUBAGENT:
        turn = max((chain.call.finished_at for chain in ended if chain.call.label != SUBAGENT), default=0.0)
        joined = [chain.length for chain in ended if chain.call.finished_at >= turn]
        return last.call.finished_at, max(joined)
    return last.call.finished_at, last.length


def _is_work(call: Completion) -> bool:
    """Whether a call is a turn of the agent's, whole. Rows written before labels existed count as work."""
    return call.label != SIDE and call.finish_reason in SERVED_FINISH_REASONS


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _overlap(spans: Iterable[Span], within: Span) -> float:
    return sum(max(0.0, min(end, within[1]) - max(begin, within[0])) for begin, end in spans)
