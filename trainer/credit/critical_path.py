"""The duration of a rollout along its critical path, in seconds that do not depend on the load of the machines.

Left out: the time before the first model call and after the last one.
"""

from collections.abc import Sequence

from proxy.pool.completions.records import Completion


def critical_path(calls: Sequence[Completion], tokens_per_second: float) -> float:
    """Seconds along the longest chain of model calls: tokens at `tokens_per_second`, plus the time of tools between
    calls.

    A call follows the one that ended last before it began; the time between the two is the tools', as measured. Calls
    that overlap are in different chains, and the longer chain counts, so sub-agents that run side by side make it
    shorter.
    """
    chains: list[tuple[float, float]] = []
    """When each call ended, and the length of its chain up to its end; both in seconds."""
    for call in sorted(calls, key=lambda call: call.started_at):
        before = max((chain for chain in chains if chain[0] <= call.started_at), default=(call.started_at, 0.0))
        length = before[1] + call.started_at - before[0] + call.sampled_count / tokens_per_second
        chains.append((call.finished_at, length))
    return max((length for _, length in chains), default=0.0)
