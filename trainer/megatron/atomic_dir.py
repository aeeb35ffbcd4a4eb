"""Directories that are either complete and on disk, or absent.

A directory is filled under a temporary name, its files and itself are synced, and it is renamed; one that is deleted
loses its name first. A crash leaves at most directories with temporary names, which the next write of the same name and
the next deletion remove.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory; at the end of the block it stands, durable, as `target`."""
    begin(target)
    yield unfinished(target)
    commit(target)


def unfinished(target: Path) -> Path:
    """Where `target` is being written."""
    return target.with_name(f".{target.name}.new")


def begin(target: Path) -> None:
    """Make the empty directory that will become `target`."""
    shutil.rmtree(unfinished(target), ignore_errors=True)
    unfinished(target).mkdir(parents=True)


def commit(target: Path) -> None:
    """Sync what was written and put it in the place of `target`."""
    directory = unfinished(target)
    for path in (*directory.rglob("*"), directory):
        sync(path)
    remove(target)
    os.rename(directory, target)
    sync(target.parent)


def remove(target: Path) -> None:
    """Delete a directory, if it is there, and what crashes left of the deletion of others beside it."""
    if target.exists():
        os.rename(target, target.with_name(f".{target.name}.old"))
    for left in target.parent.glob(".*.old"):
        shutil.rmtree(left)


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
