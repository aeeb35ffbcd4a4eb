"""The console script `proxy`: picks the command and turns errors of the user into one sentence."""

import argparse
import logging
import sys
from pathlib import Path

from proxy.commands import dashboard, doctor, engine, pool, replay, serve
from proxy.engine.tiny_model import make_tiny_model
from proxy.http.redact import RedactingFormatter
from proxy.pool.errors import UserError
from proxy.pool.terminal.command_line import CommandParser, add_common
from proxy.pool.terminal.errors import error_line


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 2, and one sentence on stderr, for what the user must change."""
    arguments = parser().parse_args(argv)
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


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top: argparse.ArgumentParser = CommandParser(
        prog="proxy", description="The gateway that agents talk to, and its engine."
    )
    add_common(top)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str, example: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, epilog=f"example: {example}")

    serve.add_arguments(add("serve", "serve agents and record every model call", "proxy serve runs/serve.toml"))
    engine.add_arguments(add("engine", "run the inference engine", "proxy engine runs/serve.toml"))
    text = "serve a recorded attempt again, without an engine"
    replay.add_arguments(add("replay", text, "proxy replay runs/serve.toml 1 --port 8001"))
    dashboard.add_arguments(add("dashboard", "show a pool in the browser", "proxy dashboard runs/pool.db"))
    doctor.add_arguments(add("doctor", "say what this machine has and what is missing", "proxy doctor runs/serve.toml"))
    tiny = add("tiny-model", "make a tiny random Qwen3 model", "proxy tiny-model runs/tiny --seed 1")
    tiny.add_argument("directory", type=Path)
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_tiny_model)
    text = "check, show and export what is recorded"
    pool.add_commands(commands.add_parser("pool", help=text, description=text))
    return top


def _tiny_model(arguments: argparse.Namespace) -> int:
    make_tiny_model(arguments.directory, arguments.seed)
    print(f"model: {arguments.directory}")
    return 0
