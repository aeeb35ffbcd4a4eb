"""The console script `harness`. Its verbs are in harness/commands, one module each."""

import argparse
import asyncio
import signal
import sys

from harness.commands import agents, behaviour, evaluations, replay, rescore, run, validate, watch
from proxy.pool.errors import PoolError, UserError
from proxy.pool.terminal.command_line import CommandParser, add_common
from proxy.pool.terminal.errors import error_line

VERBS = (run, watch, evaluations, behaviour, replay, rescore, agents, validate)
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top: argparse.ArgumentParser = CommandParser(prog="harness", description="Run tasks with agents, many at a time.")
    add_common(top)
    verbs = top.add_subparsers(required=True, metavar="VERB")
    for verb in VERBS:
        verb.add_to(verbs)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 2 after an error that the user can mend, 130 after Ctrl-C."""
    given = parser().parse_args(argv)
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
