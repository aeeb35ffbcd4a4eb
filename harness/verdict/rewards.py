"""Reads rewards: finite numbers that a verifier wrote, alone or with named parts.

`reward.json` holds a number, or an object of names and numbers. The number named `reward` is the reward and the others
are its parts. Several names without `reward` are no reward. Nothing here turns a missing reward into a number. The work
of an agent may have written the file, so JSON is read strictly and names are bounded.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from harness.failure import AttemptFailed

MAX_BYTES = 64 << 10
"""Largest reward file that is read."""
MAX_NAME = 200
"""Characters of a part's name."""


class NoReward(Exception):
    """The verifier wrote something that is no reward; the message says what in one sentence."""


@dataclass(frozen=True)
class Verdict:
    """A reward and the parts it is made of."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


def from_text(text: bytes, source: str) -> Verdict:
    """Read a file that holds one number. NoReward, with `source` as the file's name, when it does not."""
    try:
        reward = float(text)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise NoReward(f"{source} holds no finite number: {text[:80]!r}")
    return Verdict(reward)


def from_json(text: bytes, source: str) -> Verdict:
    """Read a file that holds a number, or an object of names and numbers. NoReward when it does not."""
    try:
        content = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise NoReward(f"{source} is no JSON ({error}): {text[:80]!r}") from error
    parts = content if isinstance(content, dict) else {"reward": content}
    for name in parts:
        _check_name(name, source)
    numbers = {name: _finite(value, f"{source} holds no finite number for {name!r}") for name, value in parts.items()}
    if "reward" in numbers:
        return Verdict(numbers["reward"], {name: value for name, value in numbers.items() if name != "reward"})
    if len(numbers) == 1:
        return Verdict(next(iter(numbers.values())), numbers)
    raise NoReward(f"{source} names {sorted(numbers)[:10]} and no 'reward'; the verifier must say which number it is")


def _check_name(name: str, source: str) -> None:
    if len(name) > MAX_NAME:
        shown = f"a name of {len(name)} characters, and at most {MAX_NAME} are taken: {name[:40]!r}"
        raise NoReward(f"{source} holds {shown}...; the verifier must write a shorter one")
    if not name.isprintable():
        raise NoReward(f"{source} holds a name that is not printable: {name!r}; the verifier must write a plain one")


def _finite(value: object, otherwise: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoReward(f"{otherwise}: {str(value)[:80]}")
    return number


def within(bounds: tuple[float, float], verdict: Verdict) -> Verdict:
    """Return a verdict whose reward is within the task's range. NoReward for any other."""
    lowest, highest = bounds
    if lowest <= verdict.reward <= highest:
        return verdict
    outside = f"the reward {verdict.reward:g} is outside of {lowest:g} to {highest:g}"
    raise NoReward(f"{outside}; if the task means it, set verifier.range")


def below(verdict: Verdict, least: float | Mapping[str, float] | None) -> bool:
    """Whether a step's reward is below its `min_reward`. A part that is missing is below any number."""
    if least is None:
        return False
    minima = least if isinstance(least, Mapping) else {"reward": least}
    rewards = {**verdict.parts, "reward": verdict.reward}
    return any(rewards.get(name, -math.inf) < minimum for name, minimum in minima.items())


def joined(steps: Sequence[tuple[str, Verdict]], how: Literal["mean", "final"]) -> Verdict:
    """Make one verdict of the steps that were verified: the mean, or the last.

    Its parts are the reward of each step as `step:NAME` and the step's own parts as `step:NAME:PART`. Those of single
    turns keep their name, since turns are counted over the attempt; where steps name the same turn, they are added up.
    AttemptFailed("verifier") when that gives no finite number.
    """
    rewards = {f"step:{name}": verdict.reward for name, verdict in steps}
    reward = steps[-1][1].reward if how == "final" else sum(rewards.values()) / len(rewards)
    parts: dict[str, float] = {}
    for step, verdict in steps:
        for name, value in verdict.parts.items():
            whole = name if name.startswith("turn:") else f"step:{step}:{name}"
            parts[whole] = parts.get(whole, 0.0) + value
            if not math.isfinite(parts[whole]):
                raise AttemptFailed("verifier", f"the steps' rewards of {name!r} have no finite sum")
    return Verdict(reward, parts | rewards)
