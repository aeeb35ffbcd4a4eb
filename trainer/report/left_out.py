"""What was left out since the last step, by the step or on the way to it: groups, rollouts and tokens by reason."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from proxy.pool.database import Pool
from proxy.pool.inspect.account import DECILES, TRAINED, account, by_decile
from proxy.pool.training.fates import RolloutFate, Tally, sums
from proxy.pool.training.places import CALLED_OFF
from proxy.pool.training.steps import newest_metrics
from proxy.pool.untrained import UntrainedReason

SO_FAR = "left_out_so_far"


def left_out(pool: Pool, run_id: int, fates: Iterable[RolloutFate]) -> dict[str, Any]:
    """Return the metrics of what the run left out since its newest step. `fates`: of the step that is to be published.

    They are the difference of two accounts, so nothing is missed or counted twice, whenever it happened.
    """
    so_far: dict[str, Tally] = defaultdict(Tally, account(pool, run_id, replays=False).left_out)
    for reason, tally in sums(fates).left_out.items():
        if reason not in CALLED_OFF.values() and reason != UntrainedReason.GIVEN:
            so_far[reason] += tally
    before = {reason: Tally(*counts) for reason, counts in newest_metrics(pool, run_id).get(SO_FAR, {}).items()}
    new = {reason: tally - before.get(reason, Tally()) for reason, tally in sorted(so_far.items())}
    new = {reason: tally for reason, tally in new.items() if tally != Tally()}
    return {
        "left_out_rollouts": {reason: tally.rollouts for reason, tally in new.items()},
        "left_out_tokens": {reason: tally.tokens for reason, tally in new.items()},
        SO_FAR: {reason: [tally.groups, tally.rollouts, tally.tokens] for reason, tally in sorted(so_far.items())},
    }


def left_out_by_length(fates: Iterable[RolloutFate]) -> dict[str, Any]:
    """Return the share of the step's tokens that each reason left out, by the decile of their rollout's length.

    Absent below ten rollouts.
    """
    parts: list[Counter[str]] = []
    for rollout in fates:
        part = Counter({TRAINED: sum(item.trained for item in rollout.completions)})
        for item in rollout.completions:
            for why, tokens in item.left_out.items():
                part[why.heading] += tokens if why.reason != UntrainedReason.GIVEN else 0
        parts.append(part)
    if len(parts) < DECILES:
        return {}
    reasons = {reason: deciles for reason, deciles in by_decile(parts).items() if reason != TRAINED}
    flat = {f"{reason}/{n}": part for reason, deciles in reasons.items() for n, part in enumerate(deciles, 1) if part}
    return {"left_out_by_length": flat}
