"""`harness evaluations`: what the evaluations of a training run came to, in two tables.

The curves have the evaluations of this run. The matrix has all training runs of its pool, each with the policies of its
first and its last finished evaluation. What counts as held out, missing or masked: proxy/pool/inspect/evaluated.py.
"""

import argparse
import sys
from collections.abc import Sequence

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from harness.commands.which_run import add_run, opened_run, whereabouts
from harness.monitor.progress import make_console
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.evaluated import EvaluatedColumn, EvaluationPoint, MatrixRow, as_json, matrix, points
from proxy.pool.training.evaluations import evaluations


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    evaluated = verbs.add_parser(
        "evaluations",
        help="show how the agents of a training run were evaluated",
        epilog="example: harness evaluations runs/mixed",
    )
    add_run(evaluated)
    evaluated.add_argument("--json", action="store_true", help="print one JSON object")
    evaluated.set_defaults(call=_evaluations)


def _evaluations(given: argparse.Namespace) -> int:
    with opened_run(whereabouts(given)) as (pool, run):
        begun = evaluations(pool, run.id)
        if not begun:
            raise UserError(f"run {run.name!r} was not evaluated; start it with --eval-tasks")
        found = points(pool, begun)
        if given.json:
            sys.stdout.buffer.write(msgspec.json.encode(as_json(found, matrix(pool))) + b"\n")
        elif not found:
            print(f"the evaluation of step {begun[-1].of.step} has begun; no rollout has finished yet")
        else:
            show_evaluations(make_console(), pool, found)
    return 0


def show_evaluations(console: Console, pool: Pool, found: Sequence[EvaluationPoint]) -> None:
    """Print the curves of a training run and the matrix over all training runs of the pool."""
    console.print("Mean rewards by step", curves_table(found), sep="\n")
    console.print("Mean rewards by policy", matrix_table(matrix(pool)), sep="\n")


def curves_table(found: Sequence[EvaluationPoint]) -> Table:
    """A table with a row for each evaluated version, by step, and a column for each agent and kind of tasks."""
    columns = sorted({point.column for point in found})
    table = _table(["step", "weights that sampled"], columns)
    for version in dict.fromkeys(point.version for point in found):
        row = [point for point in found if point.version == version]
        sampled = sorted({name for point in row for name in point.versions})
        table.add_row(str(row[0].step), ", ".join(sampled) or "none", *_cells(row, columns))
    return table


def matrix_table(rows: Sequence[MatrixRow]) -> Table:
    """A table with a row for each policy: its run and step, the agents it was trained with, and the same columns."""
    columns = sorted({point.column for row in rows for point in row.points})
    table = _table(["run", "step", "trained with"], columns)
    for row in rows:
        trained = ", ".join(row.trained) or "nothing yet"
        table.add_row(row.run, str(row.step), trained, *_cells(row.points, columns))
    return table


def _table(first: Sequence[str], columns: Sequence[EvaluatedColumn]) -> Table:
    """An empty table with the headings `first` and one more for each agent and kind of tasks."""
    table = Table(*first, box=box.SIMPLE)
    for column in columns:
        table.add_column(column.text, justify="right")
    return table


def _cells(row: Sequence[EvaluationPoint], columns: Sequence[EvaluatedColumn]) -> list[str]:
    """What a row says in each column; "-" where it was not evaluated."""
    by_column = {point.column: point.text for point in row}
    return [by_column.get(column, "-") for column in columns]
