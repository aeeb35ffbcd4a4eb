"""The command `proxy replay`: serves one recorded attempt, and says at its end what was played and what differed."""

import argparse
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from proxy.commands.pool import attempt_number
from proxy.commands.recording_engine import AttemptRecording, ReplayGateway
from proxy.config import ProxyConfig
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.prompt.template import ChatTemplate

DIFFERENT = 1


def add_arguments(replay: argparse.ArgumentParser) -> None:
    replay.add_argument("attempt", metavar="ATTEMPT", help="number of the attempt")
    replay.add_argument("--pool", metavar="URL", help="the pool that has it (default: pool)")
    replay.add_argument("--record", type=Path, metavar="FILE", help="keep what is played in this SQLite file")
    replay.add_argument("--report", type=Path, metavar="FILE", help="differences (default: ./replay-ATTEMPT.jsonl)")
    replay.add_argument(
        "--ignore", action="append", default=[], metavar="REGEX", help="do not compare what matches in prompts"
    )
    replay.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default: proxy.port)")
    replay.add_argument("--ready-file", type=Path, metavar="FILE", help="written when the server accepts calls")


@contextmanager
def opened(config: ProxyConfig, given: argparse.Namespace) -> Iterator[ReplayGateway]:
    """The gateway that plays the attempt; UserError when there is nothing to play."""
    number, ignored = attempt_number(given.attempt), [_pattern(text) for text in given.ignore]
    with ExitStack() as stack:
        pool = open_pool(config.pool, create=False)
        stack.callback(pool.close)
        template = ChatTemplate(Path(config.engine.model), config.engine.tool_format)
        report = given.report or Path(f"replay-{number}.jsonl")
        recording = AttemptRecording(pool, number, template, report, ignored=ignored)
        record = given.record or Path(stack.enter_context(TemporaryDirectory(prefix="replay-"))) / "pool.db"
        yield ReplayGateway(msgspec.structs.replace(config, pool=str(record.absolute())), recording)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UserError(
            f"--ignore is no regular expression ({error}); escape what is meant literally: {text}"
        ) from error


def summed_up(gateway: ReplayGateway) -> int:
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
