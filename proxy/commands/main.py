"""The console script `proxy`: picks the command and turns errors of the user into one sentence."""

import argparse
import logging
import sys
from pathlib import Path

from proxy.commands import dashboard, doctor, engine, pool, replay, serve
from proxy.engine.tiny_model import make_tiny_model
from proxy.http.redact import RedactingFormatter
from proxy.pool.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 2, and one sentence on stderr, for what the user must change."""
    arguments = _parser().parse_args(argv)
    _log_to_stderr()
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for verbose in ("aiohttp.access", "alembic"):
        logging.getLogger(verbose).setLevel(logging.WARNING)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="proxy", description="The gateway that agents talk to, and its engine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve.add_arguments(commands.add_parser("serve", help="serve agents and record every model call"))
    engine.add_arguments(commands.add_parser("engine", help="run the inference engine"))
    replay.add_arguments(commands.add_parser("replay", help="serve a recorded attempt again, without an engine"))
    dashboard.add_arguments(commands.add_parser("dashboard", help="show a pool in the browser"))
    doctor.add_arguments(commands.add_parser("doctor", help="say what this machine has and what is missing"))
    tiny = commands.add_parser("tiny-model", help="make a tiny random Qwen3 model")
    tiny.add_argument("directory", type=Path)
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_tiny_model)
    pool.add_commands(commands.add_parser("pool", help="check, show and export what is recorded"))
    return parser


def _tiny_model(arguments: argparse.Namespace) -> int:
    make_tiny_model(arguments.directory, arguments.seed)
    print(f"model: {arguments.directory}")
    return 0
