"""From measured ceilings to rollouts a day: how many of each part a load needs, and which part ends first."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Load:
    """The load that is asked for. All but `rollouts_a_day` are assumptions about the rollouts."""

    rollouts_a_day: int = 1_000_000
    calls_per_rollout: int = 50
    group_size: int = 8
    sandboxes_per_rollout: int = 2
    """One for the agent, and a fresh one for the verifier."""


@dataclass(frozen=True)
class Part:
    """A part of the system: what a rollout asks of it, and what one of it does in a second (None: not measured)."""

    per_rollout: float
    ceiling: float | None
    multiplies: bool
    """Whether more processes or hosts do more. One run has one database and one trainer."""


def parts(load: Load, figures: Mapping[str, Any]) -> dict[str, Part]:
    """Return the parts with their measured ceilings."""
    calls = load.calls_per_rollout
    return {
        "gateway processes": Part(calls, figures["gateway_calls_per_s"], multiplies=True),
        "databases, commits": Part(calls, figures["pool_completions_per_s"], multiplies=False),
        "trainers, leases": Part(1 / load.group_size, figures["leased_groups_per_s"], multiplies=False),
        "sandbox hosts": Part(load.sandboxes_per_rollout, figures["sandbox_cycles_per_s"], multiplies=True),
    }


def estimate(load: Load, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each part needs, the part that ends first with one of each, and the one that more do not help."""
    rate = load.rollouts_a_day / SECONDS_A_DAY
    needs: dict[str, dict[str, float]] = {}
    measured = {name: part for name, part in parts(load, figures).items() if part.ceiling}
    for name, part in measured.items():
        assert part.ceiling is not None
        needs[name] = {
            "per_s": rate * part.per_rollout,
            "needed": rate * part.per_rollout / part.ceiling,
            "rollouts_a_day_of_one": SECONDS_A_DAY * part.ceiling / part.per_rollout,
        }
    alone = [name for name, part in measured.items() if not part.multiplies]
    size = figures["bytes_per_completion"]
    return {
        "assumed": asdict(load) | {"new_tokens_per_call": figures["new_tokens_per_call"]},
        "needs": needs,
        "first_bottleneck": _least(needs, list(needs)),
        "first_bottleneck_that_does_not_multiply": _least(needs, alone),
        "gigabytes_a_day": size and load.rollouts_a_day * load.calls_per_rollout * size / 1e9,
    }


def _least(needs: Mapping[str, Mapping[str, float]], names: list[str]) -> str | None:
    return min(names, key=lambda name: needs[name]["rollouts_a_day_of_one"], default=None)
