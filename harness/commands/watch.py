"""`harness watch`: shows a run from any terminal and any machine that reaches its pool.

It only reads, and ends when no process works on the run any more.
"""

import argparse
import time

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from harness.commands.which_run import add_run, opened_run, whereabouts
from harness.monitor.progress import Rate, make_console
from proxy.pool.database import Pool
from proxy.pool.inspect.account import account, account_lines
from proxy.pool.inspect.rule_states import monitor_lines
from proxy.pool.inspect.run_status import RunStatus, run_status, traffic
from proxy.pool.inspect.start_table import start_lines, start_table
from proxy.pool.rollouts.runs import Run

LOOK_SECONDS = 2.0


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    watch = verbs.add_parser(
        "watch", help="watch a run from another terminal", epilog="example: harness watch runs/mixed"
    )
    add_run(watch)
    watch.add_argument("--once", action="store_true", help="print the state once and end")
    watch.set_defaults(call=_watch)


def _watch(given: argparse.Namespace) -> int:
    where = whereabouts(given)
    with opened_run(where) as (pool, run):
        _look(make_console(), pool, run, where.expected, given.once)
    return 0


def _look(console: Console, pool: Pool, run: Run, expected: int | None, once: bool) -> None:
    """Show the run until no process works on it. Without a terminal, print its state whenever it has changed."""
    rate, shown = Rate(), ""
    with Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else console as screen:
        while True:
            now = run_status(pool, run.id)
            rate.take(traffic(pool, run.id, rate.last))
            line, table = headline(run, now, expected, rate.text), agents_table(now)
            begun = start_lines(start_table(pool, run.id))
            places = "\n".join([*monitor_lines(pool, run.id), *begun, *account_lines(account(pool, run.id))])
            if isinstance(screen, Live):
                screen.update(Group(line, table, Text(places)), refresh=True)
            elif line != shown:
                console.print(line, table, places, sep="\n", highlight=False, markup=False, soft_wrap=True)
                shown = line
            if once or now.owner is None:
                return
            time.sleep(LOOK_SECONDS)


def headline(run: Run, now: RunStatus, expected: int | None, rate: str) -> str:
    """One line: how far the run is, and which process works on it."""
    finished = sum(part.finished for part in now.agents.values())
    of = "" if expected is None else f"/{expected}"
    parts = [f"{run.name} ({run.purpose}): {finished}{of} rollouts", f"{now.open_attempts} running"]
    if expected is not None:
        parts.append(f"{max(0, expected - finished - now.open_attempts)} queued")
    if rate and now.open_attempts:
        parts.append(rate)
    if now.owner is None:
        parts.append("no process works on it")
    else:
        parts.append(f"process {now.owner.pid} on {now.owner.host}, seen {now.silent_seconds:.0f} s ago")
    return ", ".join(parts)


def agents_table(now: RunStatus) -> Table:
    """A table of rollouts per agent, with the mean calls and sampled tokens of a finished one."""
    table = Table("agent", box=box.SIMPLE)
    for name in ("finished", "verdicts", "reward", "calls", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("remarks")
    for agent, part in sorted(now.agents.items()):
        reward = f"{part.reward_sum / part.rewards:.3f}" if part.rewards else "missing"
        counts = [*([("hacked", part.hacked)] if part.hacked else []), *part.failures.most_common()]
        remarks = ", ".join(f"{count} {kind}" for kind, count in counts)
        lengths = [f"{total / part.counted:.1f}" if part.counted else "-" for total in (part.calls, part.tokens)]
        table.add_row(agent, f"{part.finished}/{part.rollouts}", str(part.rewards), reward, *lengths, remarks)
    return table
