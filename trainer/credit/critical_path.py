"""How long a rollout took on its critical path, in seconds that do not depend on the load of the machines.

Left out: the time before the first model call and after the last one.
"""

from collections.abc import Sequence

from proxy.pool.completions.records import Completion


def critical_path(calls: Sequence[Completion], tokens_per_second: float) -> float:
    """Sampled tokens at a reference rate plus the time of tools in between, along the longest chain of model calls.

    A call waits for the one that ended last before it began; what lies between the two is the tools' time, as measured.
    Calls that overlap are of different chains, of which the longer one counts: sub-agents side by side shorten it.
    """
    chains: list[tuple[float, float]] = []
    """When each call ended, and the length of its chain up to there."""
    for call in sorted(calls, key=lambda call: call.started_at):
        before = max((chain for chain in chains if chain[0] <= call.started_at), default=(call.started_at, 0.0))
        length = before[1] + call.started_at - before[0] + len(call.sampled) / tokens_per_second
        chains.append((call.finished_at, length))
    return max((length for _, length in chains), default=0.0)
