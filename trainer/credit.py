"""Returns of a rollout's turns and what they are compared with. Pure functions over lists of one number per turn.

The definitions make MiniMax-M2's (arXiv 2605.26494, equations 4-7) exact where it leaves them open. With nothing but an
outcome reward and gamma 1 every turn's return is that reward, so that reward-to-go changes nothing.
Left out: which events are worth a process reward; the training loop, which gives each rollout its group-relative
advantage and does not call these yet.
"""

import math
from collections.abc import Sequence
from statistics import fmean


def reward_to_go(rewards: Sequence[float], gamma: float = 1.0) -> list[float]:
    """G_k = sum over l >= k of gamma^(l - k) r_l (M2, equation 6), one per turn."""
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.append(total)
    return returns[::-1]


def leave_one_out(returns: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """A_ik = G_ik - mean over j != i of G_j1 (M2, equation 4): unbiased, since the others do not depend on i.

    `returns`: those of each valid rollout's turns. None when there is only one.
    """
    if len(returns) < 2:
        return None
    firsts = [turns[0] for turns in returns]
    baselines = [(sum(firsts) - first) / (len(firsts) - 1) for first in firsts]
    return [[value - baseline for value in turns] for turns, baseline in zip(returns, baselines, strict=True)]


def turn_aligned(returns: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """The same against the others' returns at the same turn, or at their last one."""
    if len(returns) < 2:
        return None
    return [
        [
            value - fmean(other[min(turn, len(other) - 1)] for other in returns if other is not turns)
            for turn, value in enumerate(turns)
        ]
        for turns in returns
    ]


def chunk_returns(final: float, chunks: int, gamma: float) -> list[float]:
    """IPA (arXiv 2512.24873, equation 7): the final reward, discounted by the chunks that were still to come."""
    return [final * gamma ** (chunks - 1 - chunk) for chunk in range(chunks)]


def segment_returns(mask: Sequence[int], rewards: Sequence[float], gamma: float) -> list[float]:
    """ROLL's `compute_agentic_reinforce_return`: discounted per contiguous run of the mask, not per token."""
    returns, total = [0.0] * len(mask), 0.0
    end = len(mask)
    while end:
        start = end
        while start and mask[start - 1]:
            start -= 1
        if start < end:
            total = rewards[end - 1] + gamma * total
            returns[start:end] = [total] * (end - start)
        end = start if start < end else end - 1
    return returns


def speed(seconds: float, baseline: float) -> float:
    """h(T) of M2's equation 5 as clip(log2(baseline / T), -1, 1): 0 at the baseline, 1 at twice its speed."""
    return max(-1.0, min(1.0, math.log2(baseline / seconds)))


def overlong(length: int, limit: int, margin: int) -> float:
    """DAPO's soft punishment (arXiv 2503.14476): 0 up to limit - margin, then falling to -1 at the limit."""
    if length <= limit - margin:
        return 0.0
    return -1.0 if length > limit else (limit - margin - length) / margin
