"""The command `proxy replay`: serves one recorded attempt, and prints at its end what was played and what differed."""

import argparse
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from proxy.commands.pool import attempt_number
from proxy.commands.recorded_attempt import AttemptRecording
from proxy.commands.replay_gateway import ReplayGateway
from proxy.commands.serve import serve_gateway, with_arguments
from proxy.config import ProxyConfig, load_config
from proxy.http import sandbox_listener
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.prompt.template import ChatTemplate

DIFFERENT = 1
"""Exit status when a request differed from the recorded ones."""


def add_arguments(replay: argparse.ArgumentParser) -> None:
    """Add the arguments of `proxy replay`."""
    replay.add_argument("config", type=Path)
    replay.add_argument("attempt", metavar="ATTEMPT", help="number of the attempt")
    replay.add_argument("--pool", metavar="URL", help="the pool that has it (default: pool)")
    replay.add_argument("--record", type=Path, metavar="FILE", help="SQLite file to record what is played in")
    replay.add_argument("--report", type=Path, metavar="FILE", help="differences (default: ./replay-ATTEMPT.jsonl)")
    replay.add_argument(
        "--ignore", action="append", default=[], metavar="REGEX", help="do not compare what matches in prompts"
    )
    replay.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default: proxy.port)")
    replay.add_argument("--ready-file", type=Path, metavar="FILE", help="written when the server accepts calls")
    sandbox_listener.add_arguments(replay)
    replay.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    config = with_arguments(sandbox_listener.without_listeners(load_config(arguments.config)), arguments)
    with _replay_gateway(config, arguments) as gateway:
        serve_gateway(gateway, arguments.ready_file)
        return _print_summary(gateway)


@contextmanager
def _replay_gateway(config: ProxyConfig, arguments: argparse.Namespace) -> Iterator[ReplayGateway]:
    """The gateway that plays the attempt; UserError when there is nothing to play."""
    number, ignored = attempt_number(arguments.attempt), [_pattern(text) for text in arguments.ignore]
    with ExitStack() as stack:
        pool = open_pool(config.pool, create=False)
        stack.callback(pool.close)
        template = ChatTemplate(Path(config.engine.model), config.engine.tool_format)
        report = arguments.report or Path(f"replay-{number}.jsonl")
        recording = AttemptRecording(pool, number, template, report, ignored=ignored)
        record = arguments.record or Path(stack.enter_context(TemporaryDirectory(prefix="replay-"))) / "pool.db"
        yield ReplayGateway(msgspec.structs.replace(config, pool=str(record.absolute())), recording)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(
            f"--ignore is not a regular expression ({error}); escape special characters with a backslash: {text}"
        ) from error


def _print_summary(gateway: ReplayGateway) -> int:
    """Print what was played; 1 when a request differed."""
    recording = gateway.recording
    differences = recording.differences
    print(
        f"attempt {recording.attempt_id}: {recording.played} of {recording.answers} answers played, "
        f"{len(differences)} requests differed"
    )
    if differences:
        print(f"first: {differences[0].sentence()}; all: {recording.report}")
    return DIFFERENT if differences else 0
