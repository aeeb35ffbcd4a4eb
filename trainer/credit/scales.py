"""Running deviations of returns, by domain: what advantages are divided by, so that domains weigh alike.

A step divides by the deviation over the steps published before it, never by its own: so the scale does not depend on
what the policy did in the step, and a batch of few groups does not decide it. The state after a step is stored with
the step (proxy/pool/training/steps.py); a rollback therefore goes back to an earlier one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from proxy.pool.behaviour.process import SAME

KEPT = 0.99
"""What an earlier step weighs, relative to the one after it: a horizon of 100 steps that have groups of the domain."""
LEAST_STEPS, LEAST_GROUPS = 2, 32
"""A domain is not scaled before so many published steps, with so many groups of it in all, have been seen."""


class DomainReturns(msgspec.Struct, frozen=True, kw_only=True):
    """Weighted moments of the first-turn returns of a domain."""

    weight: float
    mean: float
    squares: float
    """The weighted sum of the squared differences from the mean."""
    steps: int
    groups: int

    @property
    def deviation(self) -> float | None:
        """What advantages are divided by; None: too little was seen, or all returns were equal."""
        if self.steps < LEAST_STEPS or self.groups < LEAST_GROUPS:
            return None
        deviation = math.sqrt(self.squares / self.weight)
        return deviation if deviation > SAME else None


def deviations(scales: Mapping[str, Any]) -> dict[str, float]:
    """Return what advantages are divided by in each domain of a stored state where that is known."""
    return {name: known for name, returns in _read(scales).items() if (known := returns.deviation) is not None}


def added(scales: Mapping[str, Any], step: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Return the state to store after a step. `step`: by domain, the first-turn returns of each group."""
    returns = _read(scales)
    for domain, groups in step.items():
        if any(groups):
            returns[domain] = _added(returns.get(domain), groups)
    state: dict[str, Any] = msgspec.to_builtins(dict(sorted(returns.items())))
    return state


def _read(scales: Mapping[str, Any]) -> dict[str, DomainReturns]:
    return msgspec.convert(scales, dict[str, DomainReturns])


def _added(before: DomainReturns | None, groups: Sequence[Sequence[float]]) -> DomainReturns:
    """Old moments, which weigh `KEPT`, together with those of a step (Chan, Golub and LeVeque)."""
    values = [value for group in groups for value in group]
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    old = before or DomainReturns(weight=0.0, mean=0.0, squares=0.0, steps=0, groups=0)
    kept = KEPT * old.weight
    weight, apart = kept + len(values), mean - old.mean
    return DomainReturns(
        weight=weight,
        mean=old.mean + apart * len(values) / weight,
        squares=KEPT * old.squares + squares + apart**2 * kept * len(values) / weight,
        steps=old.steps + 1,
        groups=old.groups + sum(map(bool, groups)),
    )
