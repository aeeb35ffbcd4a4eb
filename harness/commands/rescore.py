"""`harness rescore`: scores recorded rollouts again, without running an agent. It only reads, unless it is to write."""

import argparse
import asyncio
from collections.abc import Sequence

from rich import box
from rich.table import Table

from harness.async_pool import AsyncPool
from harness.commands.which_run import add_run, opened_run, whereabouts
from harness.monitor.progress import make_console
from harness.rewards.judges import TrajectoryJudges
from harness.rewards.named import scorer_named
from harness.rewards.rescore import Rescored, compared, largest_changes, reasons, rescore
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import record_event
from proxy.pool.rollouts.scoring import scorable, write_scores

MOST = 10
"""Changed rollouts, and reasons, that are listed."""


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser(
        "rescore",
        help="score a run's recorded rollouts again, by a function or by judges",
        epilog="example: harness rescore runs/train --reward judge.toml",
    )
    add_run(verb)
    what = "reward function, or file of judges"
    verb.add_argument("--reward", metavar="MODULE:NAME|FILE.toml", required=True, help=what)
    verb.add_argument("--write", action="store_true", help="give finished, untrained groups their new rewards")
    verb.set_defaults(call=_rescore)


def _rescore(given: argparse.Namespace) -> int:
    with opened_run(whereabouts(given)) as (pool, run):
        rows = scorable(pool, run.id)
        if not rows:
            raise UserError(f"no rollout of {run.name} has a verdict that could be scored again; wait for the first")
        threads = AsyncPool(pool)
        scorer = scorer_named(given.reward, threads)
        rescored = asyncio.run(rescore(threads, scorer, rows))
        _show(rescored)
        if isinstance(scorer, TrajectoryJudges):
            print(f"questions to judges: {scorer.asked}; what they had said before was in the pool")
        if not given.write:
            print("nothing was written; --write gives finished, untrained groups their new rewards")
            return 0
        written = write_scores(pool, run.id, scorer.name, {one.row.rollout_id: one.to_pool() for one in rescored})
        text = f"{scorer.name} gave {written.rollouts} rollouts new rewards"
        record_event(pool, run.id, "rescore", text)
        why = (
            "because their groups are not finished (score them again when they are), a train step has taken them, or "
            "they were lost or cheated"
        )
        left = f"; {written.left} stay as they are, {why}"
        print(f"{text}{left if written.left else ''}")
    return 0


def _show(rescored: Sequence[Rescored]) -> None:
    """Print a line for each task, the rollouts that change most, and why some have no reward."""
    table = Table("task", box=box.SIMPLE)
    for name in ("rollouts", "old", "new", "without", "correlation"):
        table.add_column(name, justify="right")
    for part in compared(rescored):
        numbers = (_number(value) for value in (part.old, part.new))
        table.add_row(part.name, str(part.rollouts), *numbers, str(part.missing or ""), _number(part.correlation))
    changes = Table("rollout", "task", "member", box=box.SIMPLE)
    for name in ("old", "new"):
        changes.add_column(name, justify="right")
    largest = largest_changes(rescored, MOST)
    for one in largest:
        place = (str(one.row.rollout_id), str(one.row.task.get("id", "?")), str(one.row.member))
        changes.add_row(*place, _number(one.old), _number(one.new))
    console = make_console()
    console.print(*([table, changes] if largest else [table]))
    for why, count in list(reasons(rescored))[:MOST]:
        console.print(f"{count} without a reward: {why}", highlight=False, markup=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
