"""The monitor of a run: checks each step by the rules, tells, masks rollouts before a step, and acts after it.

What it knows of earlier steps is in their published metrics, so a restarted trainer goes on with the same states, and a
rollback takes them back too. What it did is in the pool (proxy/pool/training/interventions.py) and is done once.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from proxy.pool.database import Pool
from proxy.pool.inspect.rule_states import STATES
from proxy.pool.rollouts import runs
from proxy.pool.training import interventions, steps
from proxy.pool.training.interventions import Cause
from proxy.pool.training.windowed_fifo import LeasedGroup
from proxy.pool.untrained import UntrainedReason
from trainer.config import Config
from trainer.config.monitor import Rule
from trainer.monitor.builtin import WatchedRule, watched_rules
from trainer.monitor.figures import compared, flat
from trainer.monitor.liveness import PhaseWatch, slowest
from trainer.monitor.rollouts import behaviour, lengths, own_figures, rewarded, unmasked
from trainer.monitor.states import LEVELS, OK, RuleState, advance
from trainer.step_files import complete

TASKS = "monitor_tasks"
"""The metric of a step that holds the tasks that each rule drops."""
REMEMBERED = 20
"""Steps before that medians and trends are taken from."""
MOST_ROLLBACKS = 2
"""Rollbacks for one rule; where it would take another, the run pauses: the batches are not what causes it."""


class Monitor:
    """The rules of a run at work. Only rank 0 has one."""

    def __init__(self, config: Config, pool: Pool, run_id: int):
        self._config, self._labels, batch = config, config.batch.labels, config.batch
        self._pool, self._run_id = pool, run_id
        self.rules = watched_rules(config.monitor.rule, config.report.silent_alarms)
        # Only a schedule without a bound of its own drops groups for their age.
        self._oldest = batch.rule().max_staleness if batch.lag_bound is None else 0

    def watch_phases(self, step: int) -> PhaseWatch:
        """Return what tells of a phase of this step that hangs."""

        def tell(text: str) -> None:
            print(f"alarm in step {step}: {text}", file=sys.stderr, flush=True)
            runs.record_event(self._pool, self._run_id, "alarm", f"step {step}: {text}")

        return PhaseWatch(self._earlier(), tell)

    def mask(self, groups: Sequence[LeasedGroup], step: int, trainer: str | None) -> bool:
        """Leave out the rollouts of a leased batch that break a rule which masks and is in its alarm.

        The rules are checked with the batch itself, so none that shows it is trained. Returns whether the groups must
        be leased again, because what is left out has changed.
        """
        states = self._masking(groups, step)
        members = [member for group in groups for member in group.rollouts]
        masked = {
            member.rollout_id: member.untrained.detail
            for member in members
            if member.untrained is not None and member.untrained.reason == UntrainedReason.MONITOR
        }
        chosen: dict[int, str] = {}
        if states:
            own = own_figures(groups, self._labels)
            trained = {member.rollout_id for member in members if member.untrained is None} | masked.keys()
            for rule in (watched.rule for watched in self.rules if watched.rule.name in states):
                if states[rule.name].level == "alarm":
                    shown = (id for id in trained if _breaks(rule, own[id]))
                    chosen = dict.fromkeys(shown, rule.name) | chosen
        if chosen == masked:
            return False
        interventions.mask(self._pool, self._run_id, step, chosen, trainer)
        return True

    def _masking(self, groups: Sequence[LeasedGroup], step: int) -> dict[str, RuleState]:
        """Return the states of the rules that mask, by all rollouts of a batch: before its step, and after it.

        The step's metrics leave out the rewards of masked rollouts, so a rule would lose sight of what it masks.
        """
        rules = [watched for watched in self.rules if watched.rule.action == "mask"]
        return self._states(rules, self._of_rollouts(groups), step) if rules else {}

    def _of_rollouts(self, groups: Sequence[LeasedGroup]) -> dict[str, Any]:
        """Return those metrics of a batch that are known before its step. What the monitor masks counts in them."""
        rewards = [reward for group in unmasked(groups) for reward, _ in rewarded(group)]
        mean = {"reward_mean": fmean(rewards)} if rewards else {}
        return mean | behaviour(groups, {}) | lengths(groups, self._labels)

    def assess(self, metrics: Mapping[str, Any], groups: Sequence[LeasedGroup], step: int) -> dict[str, Any]:
        """Return the metrics that the monitor adds to those of a step: states, alarms, and tasks to drop."""
        states = self._states(self.rules, metrics, step) | self._masking(groups, step)
        alarmed = [watched for watched in self.rules if states[watched.rule.name].level == "alarm"]
        dropping = [watched.rule for watched in alarmed if watched.rule.action == "drop_task"]
        return {
            "alarms": [watched.rule.name for watched in alarmed if watched.concern != "advice"],
            "monitor": {name: LEVELS.index(state.level) for name, state in states.items()},
            STATES: {name: state.to_json() for name, state in states.items()},
            TASKS: tasks_that_break(dropping, groups, own_figures(groups, self._labels)) if dropping else {},
        }

    def tell(self, metrics: Mapping[str, Any], step: int) -> list[str]:
        """Return what to say about a step's states, the most pressing first."""
        states, before = stored(metrics), self._before(step)
        said = []
        for watched in self.rules:
            name, state = watched.rule.name, states.get(watched.rule.name, OK)
            if watched.concern == "advice":
                new = before.get(name, OK).level != "alarm" or metrics.get("alarms") != self._alarms_before(step)
                if state.level == "alarm" and new and not metrics.get("alarms"):
                    said.append(f"advice in step {step}: {sentence(watched, state)}")
            elif state.entered(step) and state.value is not None and watched.rule.breaks(state.value):
                said.append(f"alarm in step {step}: {sentence(watched, state)}")
            elif state.level == "ok" and before.get(name, OK).level == "alarm":
                said.append(f"the alarm {name} is over in step {step}")
        return said

    def act(self, version: steps.Version, trainer: str | None) -> steps.Version:
        """Do what the rules ask for after a step; return the version to go on from: an earlier one after a rollback.

        Repeating it changes nothing.
        """
        metrics = steps.newest_metrics(self._pool, self._run_id)
        states = stored(metrics)
        for watched in self.rules:
            rule, state = watched.rule, states.get(watched.rule.name, OK)
            cause = Cause(rule.name, f"step {version.step}: {sentence(watched, state)}", version.id)
            if names := metrics.get(TASKS, {}).get(rule.name):
                dropped = interventions.drop_tasks(self._pool, self._run_id, names, cause, trainer)
                if dropped:
                    self._say(f"{rule.name} drops tasks: {', '.join(dropped)}; no further group of them is opened")
            if not state.entered(version.step) or interventions.done_for(
                self._pool, self._run_id, rule.name, version.id
            ):
                continue
            if rule.action == "pause":
                self._pause(cause, trainer)
            if rule.action == "rollback":
                target = self._roll_back(cause, state, trainer)
                if target is not None:
                    return target
        return version

    def _roll_back(self, cause: Cause, state: RuleState, trainer: str | None) -> steps.Version | None:
        """Go back to the last step before the alarm began; where that cannot be or does not help, pause."""
        kept = [
            version
            for version in steps.versions(self._pool, self._run_id)
            if version.step < state.since and complete(self._config, version)
        ]
        if interventions.rollbacks_of(self._pool, self._run_id, cause.rule) >= MOST_ROLLBACKS:
            detail = f"{cause.detail} (again after {MOST_ROLLBACKS} rollbacks)"
        elif not kept:
            detail = f"{cause.detail} (no checkpoint of a step before {state.since} is left to go back to)"
        else:
            target = kept[-1]
            count = interventions.discard_after(self._pool, self._run_id, target.step, cause, trainer)
            self._say(f"{cause.rule} takes the run back to step {target.step}, {target.name}; {count} groups discarded")
            return target
        self._pause(Cause(cause.rule, detail, cause.version_id), trainer)
        return None

    def _pause(self, cause: Cause, trainer: str | None) -> None:
        interventions.pause(self._pool, self._run_id, cause, trainer)
        self._say(f"{cause.rule} pauses the run after {cause.detail}")

    def _say(self, text: str) -> None:
        runs.record_event(self._pool, self._run_id, "monitor", text)
        print(f"monitor: {text}", file=sys.stderr, flush=True)

    def _states(self, rules: Sequence[WatchedRule], metrics: Mapping[str, Any], step: int) -> dict[str, RuleState]:
        """Return the states of rules after a step with these metrics."""
        earlier = self._earlier()
        before = stored(earlier[-1]) if earlier else {}
        past = [flat(one, self._oldest) for one in earlier] if any(w.rule.trend != "none" for w in rules) else []
        now = flat(metrics, self._oldest)
        late = {phase: earlier[-1]["seconds"][phase] for phase in ("report", "push")
                if earlier and phase in earlier[-1].get("seconds", {})}  # fmt: skip
        slow = slowest(late | metrics.get("seconds", {}), earlier)
        now |= {} if slow is None else {"slow_phase": slow}
        states = {}
        for watched in rules:
            value = compared(watched.rule, now, past)
            broken = None if value is None else watched.rule.breaks(value)
            states[watched.rule.name] = advance(
                before.get(watched.rule.name, OK), broken, watched.rule.steps, step, value
            )
        return states

    def _earlier(self) -> list[dict[str, Any]]:
        return steps.recent_metrics(self._pool, self._run_id, REMEMBERED)

    def _metrics_before(self, step: int) -> Mapping[str, Any]:
        """Return the metrics of the step before this one, which is published by now."""
        return next((one for one in reversed(self._earlier()) if one["step"] < step), {})

    def _before(self, step: int) -> dict[str, RuleState]:
        return stored(self._metrics_before(step))

    def _alarms_before(self, step: int) -> list[str]:
        return list(self._metrics_before(step).get("alarms", []))


def tasks_that_break(
    rules: Sequence[Rule], groups: Sequence[LeasedGroup], own: Mapping[int, Mapping[str, float]]
) -> dict[str, list[str]]:
    """Return for each rule the tasks whose rollouts break it on average."""
    tasks: dict[str, list[str]] = defaultdict(list)
    by_task: dict[str, list[int]] = defaultdict(list)
    for group in groups:
        by_task[str(group.task["id"])] += [member.rollout_id for member in group.rollouts]
    for rule in rules:
        for task, members in sorted(by_task.items()):
            values = [value for id in members if (value := own_value(rule, own[id])) is not None]
            if values and rule.breaks(fmean(values)):
                tasks[rule.name].append(task)
    return dict(tasks)


def own_value(rule: Rule, figures: Mapping[str, float]) -> float | None:
    """Return a rollout's own figure of a rule. What never happened in it happened 0 times."""
    return figures.get(rule.figure, 0.0 if rule.figure.startswith("events/") else None)


def _breaks(rule: Rule, figures: Mapping[str, float]) -> bool:
    value = own_value(rule, figures)
    return value is not None and rule.breaks(value)


def stored(metrics: Mapping[str, Any]) -> dict[str, RuleState]:
    """Return the states of the rules after the step of these metrics."""
    return {name: RuleState.from_json(state) for name, state in metrics.get(STATES, {}).items()}


def sentence(watched: WatchedRule, state: RuleState) -> str:
    """Say what breaks a rule, and what it may mean."""
    rule = watched.rule
    side = "above" if rule.above is not None else "below"
    trend = {"none": "", "difference": " against the steps before", "ratio": " over that of the steps before"}[
        rule.trend
    ]
    value = "unknown" if state.value is None else f"{state.value:.4g}"
    since = f", since step {state.since}" if state.since != state.at else ""
    return f"{rule.name} = {value} is {side} {rule.bound:g}{since}: {watched.meaning or rule.figure + trend}"
