"""The console script `harness`. Its verbs are in harness/commands, one module each."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from proxy.pool.errors import PoolError, UserError
from proxy.pool.terminal.command_line import CommandParser, add_common, verbs_to_load
from proxy.pool.terminal.errors import error_line

VERBS = {
    "run": "run",
    "eval": "run",
    "collect": "run",
    "resume": "run",
    "watch": "watch",
    "evaluations": "evaluations",
    "behaviour": "behaviour",
    "replay": "replay",
    "rescore": "rescore",
    "agents": "agents",
    "validate": "validate",
}
"""Verb -> its module in harness/commands."""
INTERRUPTED = 130


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command line, for these words alone if they begin with a verb."""
    top: argparse.ArgumentParser = CommandParser(prog="harness", description="Run tasks with agents, many at a time.")
    add_common(top)
    verbs = top.add_subparsers(required=True, metavar="VERB")
    for module in dict.fromkeys(VERBS[verb] for verb in verbs_to_load(VERBS, words)):
        import_module(f"harness.commands.{module}").add_to(verbs)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 2 after an error that the user can mend, 130 after Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    given = parser(words).parse_args(words)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(given.call(given))
    except (UserError, PoolError) as error:
        print(error_line(error), file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped; repeat the same command to go on", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
