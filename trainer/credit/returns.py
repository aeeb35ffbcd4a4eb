"""Returns of a rollout's turns, and the baselines that they are compared with. Pure functions over one number per turn.

The definitions follow MiniMax-M2 (arXiv 2605.26494, equations 4-7) and fix what it leaves open. With an outcome reward
only and gamma 1, every turn's return is that reward, so reward-to-go changes nothing.
Left out: process rewards (proxy/pool/behaviour/process.py); how a group's rollouts use these functions
(trainer/credit/assign.py).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median


def reward_to_go(rewards: Sequence[float], gamma: float = 1.0, places: Sequence[int] | None = None) -> list[float]:
    """G_k = sum over l >= k of gamma^(p_l - p_k) r_l, one per turn. The places p of turns default to 0, 1, 2, ...

    M2 (equation 6). With an outcome reward only, these are IPA's chunk returns (arXiv 2512.24873, equation 7). Other
    places are for turns that run side by side (`places`).
    """
    spans = [later - earlier for earlier, later in pairwise(places or range(len(rewards)))]
    returns, total = [], 0.0
    for reward, span in zip(reversed(rewards), [0, *reversed(spans)], strict=True):
        total = reward + gamma**span * total
        returns.append(total)
    return returns[::-1]


def places(branches: Sequence[bool]) -> list[int]:
    """The place of each turn, in commit order. `branches`: whether each turn is a sub-agent's.

    A sub-agent's turn has the place of the next turn of the main line. So it has the discount of the turn at which its
    parent continues, however many turns it took itself.
    """
    numbers, main = [], 0
    for is_branch in branches:
        numbers.append(main)
        main += not is_branch
    return numbers


def leave_one_out(returns: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """A_ik = G_ik - mean over j != i of G_j1 (M2, equation 4). Unbiased, since the other rollouts do not depend on i.

    `returns[i]`: the returns of the turns of valid rollout i. None when there is only one rollout.
    """
    if len(returns) < 2:
        return None
    firsts = [turns[0] for turns in returns]
    baselines = [(sum(firsts) - first) / (len(firsts) - 1) for first in firsts]
    return [[value - baseline for value in turns] for turns, baseline in zip(returns, baselines, strict=True)]


def turn_aligned(returns: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """The same, against the other rollouts' returns at the same turn, or at their last turn if they have fewer."""
    if len(returns) < 2:
        return None
    return [
        [
            value - fmean(other[min(turn, len(other) - 1)] for other in returns if other is not turns)
            for turn, value in enumerate(turns)
        ]
        for turns in returns
    ]


def speed(seconds: float, baseline: float) -> float:
    """h(T) of M2's equation 5 as clip(log2(baseline / T), -1, 1): 0 at the baseline, 1 at twice its speed.

    Both arguments are in seconds.
    """
    return max(-1.0, min(1.0, math.log2(baseline / seconds)))


def speeds(seconds: Sequence[float], successes: Sequence[bool]) -> list[float]:
    """h(T_i) of each success against the median of the group's other successes, from their `seconds`.

    0 for failures, and where there is no other success.
    """
    values = []
    for index, (own, success) in enumerate(zip(seconds, successes, strict=True)):
        others = [
            time for i, (time, good) in enumerate(zip(seconds, successes, strict=True)) if good and i != index and time
        ]
        values.append(speed(own, median(others)) if success and own and others else 0.0)
    return values


def overlong(length: int, limit: int, margin: int) -> float:
    """DAPO's soft punishment (arXiv 2503.14476): 0 up to limit - margin, then falling linearly to -1 at the limit.

    All arguments are in tokens.
    """
    if length <= limit - margin:
        return 0.0
    return -1.0 if length > limit else (limit - margin - length) / margin
