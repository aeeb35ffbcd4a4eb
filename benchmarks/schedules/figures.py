"""What is simulated, and the figures of the traces."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, quantiles
from typing import Any

from benchmarks.schedules.simulation import Trace, Workload
from trainer.config.batch import BatchConfig

GROUPS = 16
"""B: groups of a train step."""
BLOCK = 5
"""Steps over which what is trained is compared with what was submitted."""
WORKLOADS = {
    "long_tailed": Workload(sigma=1.5, step_seconds=30.0),
    "moderate": Workload(sigma=0.5, step_seconds=60.0),
}
WINDOWED = BatchConfig(groups=GROUPS)
POLICIES = {
    "synchronous": BatchConfig(groups=GROUPS, schedule="synchronous"),
    "overlap": BatchConfig(groups=GROUPS, schedule="overlap"),
    "strict": BatchConfig(groups=GROUPS, schedule="strict"),
    "windowed_8": BatchConfig(groups=GROUPS, window=8),
    "windowed": WINDOWED,
    "windowed_32": BatchConfig(groups=GROUPS, window=32),
    "windowed_48": BatchConfig(groups=GROUPS, window=48),
    "windowed_64": BatchConfig(groups=GROUPS, window=64),
    # as fresh as windowed, so that they differ in the order alone
    "greedy": BatchConfig(groups=GROUPS, schedule="greedy", max_staleness=WINDOWED.lag_bound),
}


def shift(trace: Trace) -> float:
    """How far what is trained is from what was submitted: mean KL over blocks of BLOCK steps.

    Groups are counted in 4 x 4 cells, by quartiles of length and of difficulty among all that the run submitted. A
    block of groups that are drawn at random has a KL above 0 too.
    """
    cuts = [quantiles(values, n=4) for values in zip(*trace.submitted, strict=True)]
    cells = [
        tuple(sum(value > cut for cut in some) for value, some in zip(group, cuts, strict=True))
        for group in trace.submitted
    ]
    whole = Counter(cells)
    blocks = [sum(trace.steps[at : at + BLOCK], []) for at in range(0, len(trace.steps), BLOCK)]
    return fmean(divergence(Counter(cells[index] for index in block), whole) for block in blocks)


def divergence(part: Mapping[Any, int], whole: Mapping[Any, int]) -> float:
    """KL(part || whole) in nats, of two histograms. Each cell of the part is in the whole."""
    sizes = sum(part.values()), sum(whole.values())
    return sum(
        count / sizes[0] * math.log(count / sizes[0] * sizes[1] / whole[cell]) for cell, count in part.items() if count
    )


def figures(traces: Mapping[tuple[str, str], Sequence[Trace]]) -> dict[str, Any]:
    """The figures of all runs, by workload and policy, and those that the page compares."""
    table: dict[str, dict[str, Any]] = {workload: {} for workload, _ in traces}
    for (workload, policy), runs in traces.items():
        batch = POLICIES[policy]
        table[workload][policy] = {
            "window": batch.rule().window,
            "queue_limit": batch.open_groups,
            "lag_bound": batch.lag_bound,
            "lag_max": max(run.lag for run in runs),
            "steps_per_hour": sum(len(run.steps) for run in runs) / sum(run.seconds for run in runs) * 3600,
            "shift": fmean(shift(run) for run in runs),
            "dropped": dict(sum((Counter(run.dropped) for run in runs), Counter())),
        }
    long_tailed, moderate = table["long_tailed"], table["moderate"]

    def ratio(cases: dict[str, Any], policy: str, other: str) -> float:
        return float(cases[policy]["steps_per_hour"] / cases[other]["steps_per_hour"])

    shifts = {f"shift_{name}": long_tailed[name]["shift"] for name in ("windowed", "greedy", "strict")}
    added = shifts["shift_greedy"] - shifts["shift_strict"]
    return {
        "windowed_vs_sync": ratio(long_tailed, "windowed", "synchronous"),
        "lag_bound": WINDOWED.lag_bound,
        "lag_max": long_tailed["windowed"]["lag_max"],
        "windowed_vs_greedy_moderate": ratio(moderate, "windowed", "greedy"),
        **shifts,
        "shift_removed": (shifts["shift_greedy"] - shifts["shift_windowed"]) / added if added else None,
        "cases": table,
    }
