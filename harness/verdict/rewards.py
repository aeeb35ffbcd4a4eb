"""What counts as a reward: a finite number that the verifier wrote, alone or with named parts.

`reward.json` holds a number, or names with numbers; the one named `reward` is the reward and the others are its parts.
Left out: any rule that would make one reward of several names. Nothing here turns a missing reward into a number.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

MAX_BYTES = 64 << 10
"""Of a reward file."""


class NoReward(Exception):
    """What was written is no reward: one sentence."""


@dataclass(frozen=True)
class Verdict:
    """A reward and the parts it is made of."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


def from_text(text: bytes, source: str) -> Verdict:
    """The number that is all of a file; `source` names the file in the error."""
    try:
        reward = float(text)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise NoReward(f"{source} holds no finite number: {text[:80]!r}")
    return Verdict(reward)


def from_json(text: bytes, source: str) -> Verdict:
    """A number, or an object of names and numbers."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise NoReward(f"{source} is no JSON ({error}): {text[:80]!r}") from error
    parts = found if isinstance(found, dict) else {"reward": found}
    numbers = {name: _finite(value, f"{source} holds no finite number for {name!r}") for name, value in parts.items()}
    if "reward" in numbers:
        return Verdict(numbers["reward"], {name: value for name, value in numbers.items() if name != "reward"})
    if len(numbers) == 1:
        return Verdict(next(iter(numbers.values())), numbers)
    raise NoReward(f"{source} names {sorted(numbers)} and no 'reward'; the verifier must say which number it is")


def _finite(value: object, otherwise: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise NoReward(f"{otherwise}: {str(value)[:80]}")
    return number


def below(verdict: Verdict, least: float | Mapping[str, float] | None) -> bool:
    """Whether a step fell short of its `min_reward`. A part that is missing is below any number."""
    if least is None:
        return False
    wanted = least if isinstance(least, Mapping) else {"reward": least}
    given = {**verdict.parts, "reward": verdict.reward}
    return any(given.get(name, -math.inf) < number for name, number in wanted.items())


def joined(steps: Sequence[tuple[str, Verdict]], how: Literal["mean", "final"]) -> Verdict:
    """The verdict on a task from those on its steps, of those that were judged; their rewards are parts of it."""
    rewards = {f"step:{name}": verdict.reward for name, verdict in steps}
    reward = steps[-1][1].reward if how == "final" else sum(rewards.values()) / len(rewards)
    return Verdict(reward, rewards)
