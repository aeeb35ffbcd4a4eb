"""Directories that are either complete and on disk, or absent.

A directory is filled under a temporary name; its files and the directory itself are synced, and then it is renamed.
Deleting a directory renames it first. So a crash leaves only directories with temporary names, which the next write of
the same name and the next deletion remove.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.pool.files import sync
from proxy.pool.terminal.progress import MEGABYTE


@contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory; when the block ends, it stands durably at `target`."""
    begin(target)
    yield unfinished(target)
    commit(target)


def unfinished(target: Path) -> Path:
    """The path under which `target` is being written."""
    return target.with_name(f".{target.name}.new")


def size(directory: Path) -> int:
    """Return the bytes of a directory's files, also while they are written; 0 where there is none."""
    total = 0
    try:
        for path in directory.rglob("*"):
            total += path.stat().st_size
    except OSError:  # it got its name, or was deleted, meanwhile
        pass
    return total


def written(target: Path) -> Callable[[], str]:
    """Return what says how many megabytes of a directory are written, beside the size of the newest one of its kind.

    They are alike for checkpoints of a run, but nothing says that they are equal, so it is no total.
    """
    kind = target.name.rpartition("-")[0]
    before = max((path for path in target.parent.glob(f"{kind}-*")), default=None)
    usual = "" if before is None else f", the last one has {size(before) / MEGABYTE:.0f} MB"
    return lambda: f"saving {target} ({size(unfinished(target)) / MEGABYTE:.0f} MB{usual})"


def begin(target: Path) -> None:
    """Make the empty directory that will become `target`."""
    shutil.rmtree(unfinished(target), ignore_errors=True)
    unfinished(target).mkdir(parents=True)


def commit(target: Path) -> None:
    """Sync what was written and rename it to `target`, in place of what was there."""
    directory = unfinished(target)
    # Data first, then the name: a rename that is on disk before its files would give a crash an incomplete `target`.
    for path in (*directory.rglob("*"), directory):
        sync(path)
    remove(target)
    os.rename(directory, target)
    sync(target.parent)


def remove(target: Path) -> None:
    """Delete a directory if it exists, and the remains of deletions beside it that a crash interrupted.

    Remains are those of `target` itself; where its name ends in a number, also those of the others of its kind.
    """
    kind, _, number = target.name.rpartition("-")
    names = rf"{re.escape(kind)}-\d+" if number.isdecimal() else re.escape(target.name)
    for path in target.parent.glob(".*.old"):
        if re.fullmatch(rf"\.{names}\.old", path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        os.rename(target, old)
        shutil.rmtree(old)
