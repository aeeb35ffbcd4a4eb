"""Reads files that strangers wrote (TOML, YAML, JSON lines): bounded before they are parsed, and checked after that.

A parser may need seconds and gigabytes for a small file: tomllib for a key of 30,000 parts, YAML for aliases of
aliases. So sizes, key parts and expanded aliases are counted first. The parsed content has a bounded depth and number
of values, no number that is infinite or larger than 64 bits, and no text that cannot be written as UTF-8. Every fault
is a UserError of one sentence. Left out: which keys a file may have (settings_file.py), and whole directories
(sandboxes/host_files).
"""

import math
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from proxy.pool.errors import UserError

TOML_BYTES = 256 << 10
"""tomllib needs up to 1.2 kB for each part of a key, so such a file takes at most some 150 MB."""
YAML_BYTES = 64 << 10
"""PyYAML reads about 50 kB a second."""
LINE_BYTES = 8 << 20
"""One line of a JSON Lines file, which may hold whole files as text. Parsed, a hostile one takes 50 times as much."""
TEXT_BYTES = 1 << 20
KEY_PARTS = 32
"""Parts of one dotted TOML key. tomllib's memory and time grow with the square of this number."""
DEPTH = 64
VALUES = 100_000
"""Values (keys included) of one file or one line. In YAML an alias counts as often as it is expanded."""
SHOWN = 200
"""Characters of a value that a message shows."""
_LARGEST = 2**63
_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_\\-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{KEY_PARTS},}}")
"""What tomllib could read as a key of too many parts, tried at each place: so no quote before it can hide it. A key
begins behind no backslash; without that rule, a text of 100,000 escaped quotes would be searched once for each."""


def open_input(path: Path, follow: bool = True) -> IO[bytes]:
    """Open a regular file. OSError when it cannot be opened, UserError when it is a device, a pipe or the like.

    `follow`: also where the path's last part is a link. Not for files that others may put there: a link would show them
    what only this user may read.
    """
    links = 0 if follow else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)  # opening a FIFO must not hang
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UserError(f"the file {path} is not a regular file; name one")


def read_text(path: Path, limit: int = TEXT_BYTES) -> str:
    """Read a text file of at most `limit` bytes."""
    try:
        with open_input(path) as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise UserError(f"the file {path} has more than {limit} bytes, which is the limit; shorten it")
        return content.decode()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL, or bytes that are no UTF-8
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"the file {path} cannot be read ({reason}); name an existing text file") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; `where` names its source in messages."""
    if _LONG_KEY.search(text):
        raise UserError(f"{where} has a key of more than {KEY_PARTS} parts (or a text like one); shorten it")
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise UserError(f"{where} is nested more than {DEPTH} levels deep; flatten it") from error
    except ValueError as error:  # TOMLDecodeError; a number of more digits than Python reads
        raise UserError(f"{where} is not valid TOML ({shortened(str(error))}); correct it") from error
    check_content(table, where)
    return table


def parse_json(text: bytes, where: str) -> Any:
    """Parse JSON; `where` names its source in messages."""
    try:
        content = msgspec.json.decode(text)
    except RecursionError as error:
        raise UserError(f"{where} is nested more than {DEPTH} levels deep; flatten it") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not a JSON object ({error}); write one object per line") from error
    check_content(content, where)
    return content


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield place (`FILE line N`) and content of each line that is not blank."""
    try:
        with open_input(path) as file:
            number = 0
            while line := file.readline(LINE_BYTES + 1):
                number += 1
                where = f"{path} line {number}"
                if len(line) > LINE_BYTES:
                    raise UserError(f"{where} has more than {LINE_BYTES} bytes, which is the limit; shorten it")
                if line.strip():
                    yield where, parse_json(line, where)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"the task file {path} cannot be read ({reason}); name an existing file") from error


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML of the safe tags; `where` names its source in messages."""
    import yaml  # imported here: only some tasks have such a file

    try:
        _check_events(yaml.parse(text, Loader=yaml.SafeLoader), where)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{where} cannot be read as YAML ({shortened(' '.join(str(error).split()))})") from error
    check_content(content, where)
    return content


def _check_events(events: Iterator[Any], where: str) -> None:
    """Count depth and values of a YAML document, each alias with all that it stands for, before anything is built."""
    values, anchors, opened = 0, dict[str, int](), list[tuple[str | None, int]]()
    for event in events:
        kind = type(event).__name__
        if kind == "AliasEvent":
            values += anchors.get(event.anchor, 1)  # an unknown or open anchor is left to the parser or to the depth
            if any(event.anchor == anchor for anchor, _ in opened):
                raise UserError(f"{where} has an alias of itself (*{event.anchor}); write the value out")
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            values += 1
            opened.append((event.anchor, values))
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            anchor, before = opened.pop()
            if anchor is not None:
                anchors[anchor] = values - before + 1
        elif kind == "ScalarEvent":
            values += 1
            if event.anchor is not None:
                anchors[event.anchor] = 1
        if len(opened) > DEPTH:
            raise UserError(f"{where} is nested more than {DEPTH} levels deep; flatten it")
        if values > VALUES:
            raise UserError(f"{where} has more than {VALUES} values with its aliases expanded; shorten it")


def check_content(content: Any, where: str) -> None:
    """UserError when parsed content is too deep, too much, or holds a number or text that others could not take."""
    values = 0
    left: list[tuple[Any, int]] = [(content, 0)]
    while left:
        value, depth = left.pop()
        values += 1
        if values > VALUES:
            raise UserError(f"{where} has more than {VALUES} values; shorten it")
        if depth > DEPTH:
            raise UserError(f"{where} is nested more than {DEPTH} levels deep; flatten it")
        if isinstance(value, dict):
            left += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list | tuple | set):
            left += [(item, depth + 1) for item in value]
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where} has a number that is {value}; write a finite one")
        elif isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            raise UserError(f"{where} has an integer of more than 64 bits; write a smaller one")
        elif isinstance(value, str) and not value.isascii() and any("\ud800" <= sign <= "\udfff" for sign in value):
            raise UserError(f"{where} has a text that is no Unicode ({shortened(ascii(value))}); correct it")


def shortened(text: str) -> str:
    """The text, without its middle if it is long."""
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
