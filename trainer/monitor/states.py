"""The states of a rule: ok, watch, alarm. Pure: the state after a step follows from the one before and one value.

A rule that is broken goes to watch, and to alarm when so many steps in a row have broken it as it says. An alarm is
over when so many in a row have kept it. A step whose value is not known changes nothing.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec

Level = Literal["ok", "watch", "alarm"]
LEVELS: tuple[Level, ...] = ("ok", "watch", "alarm")


@dataclass(frozen=True)
class RuleState:
    """The state of a rule after a step."""

    level: Level = "ok"
    since: int = 0
    """The step that broke it first; 0: it is ok."""
    at: int = 0
    """The step at which it came to this level; 0: it never left it."""
    count: int = 0
    """Steps in a row that speak for the next change: that break it, or that keep it in an alarm."""
    value: float | None = None
    """What was compared with the bound in the last step; None: it was not known."""

    def entered(self, step: int) -> bool:
        """Whether the alarm began with this step."""
        return self.level == "alarm" and self.at == step

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Any) -> "RuleState":
        return msgspec.convert(stored, cls)


OK = RuleState()


def advance(before: RuleState, broken: bool | None, steps: int, step: int, value: float | None = None) -> RuleState:
    """Return the state after a step. `broken`: whether the step broke the bound; None: it is not known."""
    level, since, at, count = before.level, before.since, before.at, before.count
    if broken is None:
        return RuleState(level, since, at, count, value)
    if level == "alarm":
        count = 0 if broken else count + 1
        return RuleState("ok", 0, step, 0, value) if count >= steps else RuleState(level, since, at, count, value)
    if not broken:
        return RuleState("ok", 0, step if level == "watch" else at, 0, value)
    count, since = (count + 1, since) if level == "watch" else (1, step)
    if count >= steps:
        return RuleState("alarm", since, step, 0, value)
    return RuleState("watch", since, at if level == "watch" else step, count, value)
