"""The commands of `proxy pool`. Only `archive` and `import` change a pool, and only `import` creates one."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from proxy.commands.traces import export_spans, export_traces, import_demonstrations
from proxy.pool.audit import audit_lines
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import PoolError, UserError
from proxy.pool.export.batches import BATCH_WRITERS, write_batch
from proxy.pool.export.files import WRITERS, export
from proxy.pool.inspect.account import account, account_lines, length_lines, shares_by_length
from proxy.pool.inspect.show import show
from proxy.pool.inspect.verify import verify
from proxy.pool.read import RolloutFilter
from proxy.pool.retention.archive import archive, drop
from proxy.pool.retention.horizon import horizon
from proxy.pool.rollouts.runs import find_run
from proxy.pool.traces.files import TRACE_FILES

DAMAGED = 1
SPANS = "otel"
"""The format that is sent and not written."""


def add_arguments(pool: argparse.ArgumentParser) -> None:
    """Add the commands of `proxy pool`."""
    commands = pool.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str, example: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, epilog=f"example: proxy pool {name} {example}")
        command.set_defaults(run=run)
        return command

    verify_all = add("verify", "read every token path against its checksum", "runs/pool.db", _verify)
    one = add("show", "print an attempt as a tree", "runs/pool.db 1", _show)
    example = "runs/pool.db train --output train.jsonl"
    run = add("export", "write a run's completions to a file", example, _export)
    text = "print who got keys, whose keys were refused, and administrators' calls"
    events = add("events", text, "runs/pool.db", _events)
    balance = add("account", "say of every sampled token of a run where it is", "runs/pool.db train", _account)
    example = "pool.db train --older-than 20 --to archive"
    archived = add("archive", "move the rollouts of old train steps to a file", example, _archive)
    example = "pool.db shown traces --model runs/tiny"
    imported = add("import", "store ATIF documents as demonstrations for `trainer sft`", example, _import)
    for command in (verify_all, one, run, events, balance, archived, imported):
        command.add_argument("pool", metavar="POOL", help="SQLite file or database URL")
    one.add_argument("attempt", metavar="ATTEMPT", help="number of the attempt")
    for command in (run, balance, archived, imported):
        command.add_argument("name", metavar="RUN", help="name of the run")
    formats = [*WRITERS, *BATCH_WRITERS, *TRACE_FILES, SPANS]
    run.add_argument(
        "--format", choices=formats, default="jsonl", help="(%(default)s) slime, verl: a training batch; docs/traces.md"
    )
    run.add_argument("--step", type=int, metavar="N", help="only the groups that train step N took")
    run.add_argument("--archives", type=Path, metavar="DIR", help="where the archive files are, if they were moved")
    run.add_argument("--output", type=Path, metavar="FILE", help="atif and hf-traces: a new directory")
    run.add_argument("--model", type=Path, metavar="DIR", help="whose chat template wrote the prompts, for traces")
    run.add_argument("--endpoint", metavar="URL", help="for otel: where spans go, such as http://HOST:4318/v1/traces")
    imported.add_argument("documents", nargs="+", type=Path, metavar="FILE", help="or a directory of documents")
    imported.add_argument("--model", type=Path, required=True, metavar="DIR", help="the model that will imitate them")
    archived.add_argument("--older-than", type=int, required=True, metavar="STEPS", help="the newest steps that stay")
    archived.add_argument("--to", type=Path, required=True, metavar="DIR", help="directory of the files")
    archived.add_argument("--drop", action="store_true", help="then delete from the pool what the files hold")


@contextmanager
def _opened(url: str, create: bool = False) -> Iterator[Pool]:
    pool = open_pool(url, create=create)
    try:
        yield pool
    except PoolError as error:
        raise UserError(str(error)) from error
    finally:
        pool.close()


def _verify(arguments: argparse.Namespace) -> int:
    """Print every damaged row and a summary; 1 when a row is damaged."""
    with _opened(arguments.pool) as pool:
        report = verify(pool)
        for damage in report.damages:
            print(damage)
        counts = f"{report.attempts} attempts, {report.completions} completions ({report.trainable} trainable)"
        damaged = f"{len(report.damages) or 'no'} damages"
        print(f"{pool.name}: {counts}, {report.sampled_tokens} sampled tokens, {damaged}")
    return DAMAGED if report.damages else 0


def _show(arguments: argparse.Namespace) -> int:
    number = attempt_number(arguments.attempt)
    with _opened(arguments.pool) as pool:
        print("\n".join(show(pool, number)))
    return 0


def attempt_number(text: str) -> int:
    """Read the number of an attempt; UserError for anything else."""
    if not text.isdecimal() or len(text) > 9:
        raise UserError(f"{text!r} is not the number of an attempt; take one from results.jsonl or the proxy's rows")
    return int(text)


def _events(arguments: argparse.Namespace) -> int:
    with _opened(arguments.pool) as pool:
        for line in audit_lines(pool):
            print(line)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    kind, file = arguments.format, arguments.output
    _demand_used(arguments)
    which = RolloutFilter(
        run=arguments.name,
        first_step=arguments.step,
        last_step=arguments.step,
        all_attempts=kind in WRITERS,
        archives=arguments.archives,
    )
    with _opened(arguments.pool) as pool:
        if kind in TRACE_FILES:
            print(export_traces(pool, which, kind, file, arguments.model))
        elif kind == SPANS:
            if arguments.endpoint is None:
                raise UserError("--format otel needs --endpoint, the URL that takes spans")
            print(export_spans(pool, which, arguments.endpoint, arguments.model))
        elif file is None:
            raise UserError(f"--format {kind} needs --output, the file to write")
        elif kind in WRITERS:
            print(f"{export(pool, which, kind, file)} completions: {file}")
        else:
            batch = write_batch(pool, which, kind, file)
            unusable = f"; {batch.left_out} rollouts have no reward or nothing to train" if batch.left_out else ""
            print(f"{batch.samples} samples of {batch.rollouts} rollouts: {file}{unusable}")
    return 0


def _demand_used(arguments: argparse.Namespace) -> None:
    """Refuse options that do nothing in a format."""
    kind = arguments.format
    unused = {"output": kind == SPANS, "endpoint": kind != SPANS, "model": kind not in (*TRACE_FILES, SPANS)}
    for name, is_unused in unused.items():
        if is_unused and getattr(arguments, name) is not None:
            raise UserError(f"--{name} does nothing with --format {kind}; leave it out, or name another format")


def _import(arguments: argparse.Namespace) -> int:
    opened = partial(_opened, arguments.pool, create=True)
    print(import_demonstrations(opened, arguments.name, arguments.documents, arguments.model))
    return 0


def _account(arguments: argparse.Namespace) -> int:
    """Print the account of a run; 1 when it does not balance."""
    with _opened(arguments.pool) as pool:
        run = find_run(pool, arguments.name)
        now = account(pool, run.id)
        print(f"run {run.name}", *account_lines(now), *length_lines(shares_by_length(pool, run.id)), sep="\n")
    return DAMAGED if now.unaccounted else 0


def _archive(arguments: argparse.Namespace) -> int:
    """Print what was archived, what was dropped, and from which step on groups stay, with the reason."""
    if arguments.older_than < 0:
        raise UserError(f"--older-than is a number of steps, 0 or more: {arguments.older_than}")
    with _opened(arguments.pool) as pool:
        run = find_run(pool, arguments.name)
        limits = horizon(pool, run, arguments.older_than)
        written = archive(pool, run, limits, arguments.to)
        if written is not None:
            print(f"archived {written.groups} groups with {written.completions} completions: {written.file}")
        if arguments.drop:
            print(f"dropped the completions of {drop(pool, run, limits)} groups from the pool")
    print(
        f"groups of the steps after {limits.last} stay: the newest step is {limits.newest}, and the oldest checkpoint, "
        f"to which the run may be taken back, is of step {limits.oldest_checkpoint}"
    )
    return 0
