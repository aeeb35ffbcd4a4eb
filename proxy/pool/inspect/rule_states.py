"""The monitor's rules of a run, as its trainer has published them with the newest step, and what they did."""

import time
from dataclasses import dataclass
from typing import Literal

from proxy.pool.database import Pool
from proxy.pool.training.interventions import history_of
from proxy.pool.training.steps import newest_metrics

STATES = "monitor_states"
"""The metric of a step that holds the state of each rule."""
ADVICE = frozenset({"waiting"})
"""Rules that only advise; their `alarm` is no alarm. trainer/monitor/builtin.py has them, and a test compares."""
SHOWN = 10
"""The newest things done that are shown."""


@dataclass(frozen=True)
class RuleNow:
    """A rule after the newest step."""

    name: str
    level: Literal["ok", "watch", "alarm"]
    since: int
    """The step that broke it first; 0: it is ok."""
    value: float | None
    """What was compared with its bound; None: not known."""
    advice: bool = False
    """It only advises."""


def rule_states(pool: Pool, run_id: int) -> list[RuleNow]:
    """Return the rules of a run in the order of their concern; none before the first step."""
    states = newest_metrics(pool, run_id).get(STATES, {})
    return [RuleNow(name, each["level"], each["since"], each["value"], name in ADVICE) for name, each in states.items()]


def monitor_lines(pool: Pool, run_id: int) -> list[str]:
    """Return the rules that are not ok, and what was done to the run, in lines; none where there is nothing to say."""
    lines = []
    for rule in rule_states(pool, run_id):
        if rule.level != "ok":
            value = "" if rule.value is None else f", {rule.value:.4g}"
            state = "gives advice" if rule.advice and rule.level == "alarm" else f"is in {rule.level}"
            lines.append(f"monitor: {rule.name} {state} since step {rule.since}{value}")
    for done in history_of(pool, run_id, SHOWN):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(done.at))
        task = f" {done.task}" if done.task is not None else ""
        open_pause = done.action == "pause" and done.ended_at is None
        lines.append(
            f"monitor: {when} {done.action.replace('_', ' ')}{task} by {done.rule}: {done.detail}"
            + ("; `trainer continue` ends it" if open_pause else "")
        )
    return lines
