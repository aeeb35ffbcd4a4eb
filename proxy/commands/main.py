"""The console script `proxy`: picks the command and turns errors of the user into one sentence."""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from proxy.http.redact import RedactingFormatter
from proxy.pool.errors import UserError
from proxy.pool.terminal.command_line import CommandParser, add_common, verbs_to_load
from proxy.pool.terminal.errors import error_line

COMMANDS = {
    "serve": ("serve agents and record every model call", "proxy serve runs/serve.toml"),
    "engine": ("run the inference engine", "proxy engine runs/serve.toml"),
    "replay": ("serve a recorded attempt again, without an engine", "proxy replay runs/serve.toml 1 --port 8001"),
    "dashboard": ("show a pool in the browser", "proxy dashboard runs/pool.db"),
    "doctor": ("say what this machine has and what is missing", "proxy doctor runs/serve.toml"),
    "tiny-model": ("make a tiny random Qwen3 model", "proxy tiny-model runs/tiny --seed 1"),
    "pool": ("check, show and export what is recorded", None),
}
"""Command -> its text and example. Its module in proxy/commands has the same name."""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 2, and one sentence on stderr, for what the user must change."""
    words = sys.argv[1:] if argv is None else argv
    arguments = parser(words).parse_args(words)
    _log_to_stderr()
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        print(error_line(error), file=sys.stderr)
        return 2


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for verbose in ("aiohttp.access", "alembic"):
        logging.getLogger(verbose).setLevel(logging.WARNING)


def parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command line, for these words alone if they begin with a command."""
    top: argparse.ArgumentParser = CommandParser(
        prog="proxy", description="The gateway that agents talk to, and its engine."
    )
    add_common(top)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for name in verbs_to_load(COMMANDS, words):
        text, example = COMMANDS[name]
        epilog = example and f"example: {example}"
        command = commands.add_parser(name, help=text, description=text, epilog=epilog)
        import_module(f"proxy.commands.{name.replace('-', '_')}").add_arguments(command)
    return top
