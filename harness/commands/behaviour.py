"""`harness behaviour`: shows what the agents of a run did, from any machine that reaches its pool. It only reads."""

import argparse
from collections import Counter
from typing import get_args

from rich import box
from rich.table import Table

from harness.commands.which_run import add_run, opened_run, whereabouts
from harness.monitor.progress import make_console
from proxy.pool.behaviour.statistics import Statistics, drift
from proxy.pool.errors import UserError
from proxy.pool.inspect.rule_states import monitor_lines
from proxy.pool.inspect.run_behaviour import UNTRAINED, By, reward_trend, run_behaviour

COLUMNS = {
    "reward": ("reward", "{:.3f}"),
    "turns": ("turns", "{:.1f}"),
    "calls": ("calls", "{:.1f}"),
    "failure_rate": ("failed", "{:.1%}"),
    "repeat_rate": ("repeated", "{:.1%}"),
    "characters_per_turn": ("characters", "{:.0f}"),
    "reasoning_share": ("reasoning", "{:.1%}"),
    "turns_to_first_edit": ("first edit", "{:.1f}"),
    "hacked": ("hacked", "{:.1%}"),
    "model_seconds": ("model s", "{:.1f}"),
    "tool_seconds": ("tools s", "{:.1f}"),
}
"""Figure -> its column, and how it is written."""
OF_TOOLS = ("reward", "calls", "failure_rate", "repeat_rate")
"""The figures that are kept by tool."""
MOST, MOST_OF_ONE = 20, 3
"""Commands that are listed of a run, and of one agent, domain or task."""


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    behaviour = verbs.add_parser(
        "behaviour", help="show what the agents of a run did", epilog="example: harness behaviour runs/mixed"
    )
    add_run(behaviour)
    behaviour.add_argument("--by", choices=get_args(By), default="step", help="what rollouts are added up by")
    behaviour.set_defaults(call=_show)


def _show(given: argparse.Namespace) -> int:
    where = whereabouts(given)
    with opened_run(where) as (pool, run):
        sums, rules = run_behaviour(pool, run.id, given.by), monitor_lines(pool, run.id)
        trends = reward_trend(pool, run.id, given.by) if given.by in ("agent", "domain", "task") else {}
    if not sums:
        raise UserError(f"no rollout of {where.name} has finished yet; wait for the first one")
    console = make_console()
    console.print(_figures(sums, given.by, trends))
    if trends:
        console.print(_commands(sums, given.by))
    whole = Statistics()
    for part in sums.values():
        whole.merge(part)
    if given.by != "tool":  # by tool, a rollout counts several times
        console.print(_counts("event", "per rollout", whole.events_per_rollout()))
    calls = whole.commands.total()
    console.print(_counts("command", "share", {name: n / calls for name, n in whole.commands.most_common(MOST)}))
    for line in rules:
        console.print(line, soft_wrap=True)
    return 0


def _figures(sums: dict[str, Statistics], by: By, trends: dict[str, tuple[float | None, float | None]]) -> Table:
    table, columns = Table(by, box=box.SIMPLE), COLUMNS
    if by == "tool":
        columns = {name: COLUMNS[name] for name in OF_TOOLS}
    more = ["drift"] if by == "step" else ["first half", "second half"] if trends else []
    for column in ("rollouts", *(column for column, _ in columns.values()), *more):
        table.add_column(column, justify="right")
    first = next((part.commands for key, part in sums.items() if key != UNTRAINED), Counter[str]())
    for key, part in sums.items():
        means = part.means()
        cells = [form.format(means[name]) if name in means else "" for name, (_, form) in columns.items()]
        if by == "step":
            cells.append(_number(drift(part.commands, first)))
        elif trends:
            cells += map(_number, trends.get(key, (None, None)))
        table.add_row(key, str(part.rollouts), *cells)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _commands(sums: dict[str, Statistics], by: By) -> Table:
    """The most frequent commands of each agent, domain or task, with their shares."""
    table = Table(by, "commands", box=box.SIMPLE)
    for key, part in sums.items():
        some = part.commands.most_common(MOST_OF_ONE)
        table.add_row(key, ", ".join(f"{name} {count / part.commands.total():.0%}" for name, count in some))
    return table


def _counts(what: str, of: str, values: dict[str, float]) -> Table:
    table = Table(what, box=box.SIMPLE)
    table.add_column(of, justify="right")
    for name, value in values.items():
        table.add_row(name, f"{value:.3f}")
    return table
