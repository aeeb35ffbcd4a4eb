"""Walks a directory of this machine that a stranger may have filled: never through a link, without recursion, bounded.

A link is given back as a link. It must lead to a place in the same directory: whoever follows it later, for example to
build an image, must not reach this machine's other files. Left out: what a sandbox's own processes wrote
(sandboxes/local/files.py).
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sandboxes.base import SandboxError

ENTRIES = 200_000
DEPTH = 100
"""Levels of directories. Other programs walk such a tree by recursion."""
BYTES = 16 << 30
"""All regular files together, by their sizes: a file with holes counts in full, as it does when it is copied."""
LINKS = 40
"""Links on the way of one path. The kernel follows no more."""


class TreeError(SandboxError):
    """A directory holds what cannot go into a sandbox. The message is one sentence."""


@dataclass(frozen=True)
class Entry:
    """One file, directory or link below a directory."""

    inside: str
    """Its path below that directory, with slashes."""
    path: Path
    status: os.stat_result
    """Its own: that of a link, not of what the link leads to."""


def walk(root: Path, unreadable: Callable[[OSError, str], None] | None = None) -> Iterator[Entry]:
    """Yield everything below a directory, each directory before its content, names in order.

    TreeError for a tree beyond the limits. A directory that cannot be read is an OSError, unless `unreadable` takes the
    error and the directory's path below the root.
    """
    entries = size = 0
    left = [("", 0)]
    while left:
        inside, depth = left.pop()
        if inside:
            entry = Entry(inside, root / inside, os.lstat(root / inside))
            size += entry.status.st_size if stat.S_ISREG(entry.status.st_mode) else 0
            if size > BYTES:
                raise TreeError(f"{root} holds more than {BYTES >> 30} GiB; leave some out, or put them into an image")
            yield entry
            if not stat.S_ISDIR(entry.status.st_mode):
                continue
        if depth == DEPTH:
            raise TreeError(f"{root} is more than {DEPTH} directories deep; pack the deep ones into an archive")
        try:
            with os.scandir(root / inside) as content:
                names = [item.name for item in islice(content, ENTRIES + 1 - entries)]
        except OSError as error:
            if unreadable is None:
                raise
            unreadable(error, inside)
            continue
        entries += len(names)
        if entries > ENTRIES:
            raise TreeError(f"{root} holds more than {ENTRIES} files; leave some out, or put them into an image")
        names.sort(reverse=True)
        left += [(f"{inside}/{name}" if inside else name, depth + 1) for name in names]


def check_entry(root: Path, entry: Entry) -> None:
    """TreeError for a special file, and for a link that leads out of the directory."""
    mode = entry.status.st_mode
    if stat.S_ISLNK(mode) and not leads_inside(root, entry.path):
        target = os.readlink(entry.path)
        raise TreeError(f"{entry.path} is a link that leads out of {root} (to {target}); replace it by what it names")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        raise TreeError(f"{entry.path} is a socket, a pipe or a device; remove it")


def leads_inside(root: Path, path: Path) -> bool:
    """Whether a path, with all links in it followed, is `root` or below it.

    What the kernel does not follow leads nowhere: a circle of links, a long chain of them, a name that is too long.
    """
    try:
        os.stat(path)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            return False
    top, real = os.path.realpath(root), _real(path)
    return real is not None and os.path.commonpath([top, real]) == top


def _real(path: Path) -> str | None:
    """Where a path leads, by its names alone from the first that is missing; None for more than LINKS links.

    os.path.realpath would follow a chain of any length, by recursion. To ask the kernel alone is not enough: it stops
    at a missing name, and does not see a chain behind that.
    """
    real, links, left = "/", 0, str(path.absolute()).split("/")[::-1]
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        real = os.path.dirname(real) if name == ".." else os.path.join(real, name)
        if name != ".." and os.path.islink(real):
            target = os.readlink(real)
            left += target.split("/")[::-1]
            real = "/" if target.startswith("/") else os.path.dirname(real)
            links += 1
            if links > LINKS:
                return None
    return real
