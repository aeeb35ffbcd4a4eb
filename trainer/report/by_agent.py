"""The figures of a step by agent: what share of the step each agent is, its rewards, and how long its rollouts are.

All members of a group have the same agent. Pure functions over what the step used. Not here: what agents did, which is
the matter of proxy/pool/behaviour.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np

from proxy.pool.training.windowed_fifo import LeasedGroup
from trainer.data.row import TrainingRow
from trainer.monitor.rollouts import rewarded


def by_agent(groups: Sequence[LeasedGroup], rows: Sequence[TrainingRow]) -> dict[str, Any]:
    """Summarise the step by agent. Empty where no group names its agent.

    Turns and lengths are means over an agent's rollouts that called the model. Turns count every call, tokens every
    sampled token; replayed calls are left out.
    """
    trained = trained_by_completion(rows)
    rewards = defaultdict[str, list[float]](list)
    turns, lengths = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    counts, tokens = Counter[str](), Counter[str]()
    for group in groups:
        if group.agent is None:
            continue
        counts[group.agent] += 1
        tokens[group.agent] += 0
        rewards[group.agent] += [reward for reward, _ in rewarded(group)]
        for member in group.rollouts:
            own = [item for item in member.completions if not item.replayed]
            if own:
                turns[group.agent].append(len(own))
                lengths[group.agent].append(sum(item.sampled_count for item in own))
            tokens[group.agent] += sum(trained[item.id] for item in own)
    if not counts:
        return {}
    whole = sum(tokens.values())
    return {
        "reward_by_agent": {agent: fmean(values) for agent, values in sorted(rewards.items()) if values},
        "groups_by_agent": dict(sorted(counts.items())),
        "tokens_by_agent": dict(sorted(tokens.items())),
        "share_by_agent": {agent: count / whole for agent, count in sorted(tokens.items())} if whole else {},
        "turns_by_agent": {agent: fmean(values) for agent, values in sorted(turns.items())},
        "length_by_agent": {agent: fmean(values) for agent, values in sorted(lengths.items())},
    }


def trained_by_completion(rows: Sequence[TrainingRow]) -> Counter[int]:
    """Return the number of trained tokens of each completion, by its id."""
    trained = Counter[int]()
    for row in rows:
        for completion_id, count in zip(row.completions, np.bincount(row.segment[row.places]), strict=False):
            trained[completion_id] += int(count)
    return trained
