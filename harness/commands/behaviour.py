"""`harness behaviour`: shows what the agents of a run did, from any machine that reaches its pool. It only reads."""

import argparse
import shlex
from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import get_args

from rich import box
from rich.table import Table

from harness.commands.which_run import add_run, opened_run, whereabouts
from harness.monitor.progress import make_console
from harness.run_dir import Whereabouts
from proxy.pool.behaviour.event import Kind
from proxy.pool.behaviour.statistics import Statistics, drift
from proxy.pool.errors import UserError
from proxy.pool.inspect.event_rollouts import EventRollout, event_rollouts
from proxy.pool.inspect.rule_states import monitor_lines
from proxy.pool.inspect.run_behaviour import UNTRAINED, By, reward_trend, run_behaviour
from proxy.pool.inspect.show import plain

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
    either = behaviour.add_mutually_exclusive_group()
    either.add_argument("--by", choices=get_args(By), default="step", help="what rollouts are added up by")
    text = "list the rollouts that show this event, such as retry_loop (docs/behaviour.md has all)"
    either.add_argument("--event", metavar="KIND", help=text)
    behaviour.set_defaults(call=_show)


def _show(given: argparse.Namespace) -> int:
    if given.event is not None:
        return _show_event(given, _kind(given.event))
    where = whereabouts(given)
    with opened_run(where) as (pool, run):
        sums, rules = run_behaviour(pool, run.id, given.by), monitor_lines(pool, run.id)
        trends = reward_trend(pool, run.id, given.by) if given.by in ("agent", "domain", "task") else {}
    if not sums:
        raise _nothing_yet(where)
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


def _nothing_yet(where: Whereabouts) -> UserError:
    return UserError(f"no rollout of {where.name} has finished yet; wait for the first one")


def _kind(name: str) -> Kind:
    """The kind of event of this name; UserError where there is none."""
    if name in list(Kind):
        return Kind(name)
    near = "".join(f" (the nearest: {each})" for each in get_close_matches(name, Kind, 1))
    raise UserError(f"{name!r} is no event; name one of these: {', '.join(Kind)}{near}")


def _show_event(given: argparse.Namespace, kind: Kind) -> int:
    """Print the rollouts that show this event, and how to look at one."""
    where = whereabouts(given)
    with opened_run(where) as (pool, run):
        found = event_rollouts(pool, run.id, kind)
    if not found.looked_at:
        raise _nothing_yet(where)
    console = make_console()
    if found.rollouts:
        console.print(_rollouts(found.rollouts))
    newest = f"; these are the newest {len(found.rollouts)}" if found.total > len(found.rollouts) else ""
    of = f"{found.looked_at} finished rollouts of {where.name} in the pool"
    console.print(f"{kind} is in {found.total or 'none'} of {of}{newest}", soft_wrap=True)
    if found.rollouts:
        command = f"proxy pool show {shlex.quote(pool.name)} {found.rollouts[0].attempt}"
        console.print(f"look at one by its attempt: {command}", soft_wrap=True)
    return 0


def _rollouts(some: Sequence[EventRollout]) -> Table:
    table = Table("rollout", "attempt", box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("task", overflow="fold", min_width=12)
    table.add_column("agent", overflow="fold")
    for column in ("step", "reward", "events", "first", "turn"):
        table.add_column(column, no_wrap=True)
    for each in some:
        step = UNTRAINED if each.step is None else str(each.step)
        outcome = each.failure or "" if each.reward is None else f"{each.reward:.3f}"
        place = (str(each.count), f"#{each.completion}", str(each.turn))
        table.add_row(str(each.rollout), str(each.attempt), plain(each.task), plain(each.agent), step, outcome, *place)
    return table


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
