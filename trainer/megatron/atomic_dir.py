"""Directories that are either complete and on disk, or absent.

A directory is filled under a temporary name; its files and the directory itself are synced, and then it is renamed.
Deleting a directory renames it first. So a crash leaves only directories with temporary names, which the next write of
the same name and the next deletion remove.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.pool.files import sync


@contextmanager
def replace_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory; when the block ends, it stands durably at `target`."""
    begin(target)
    yield unfinished(target)
    commit(target)


def unfinished(target: Path) -> Path:
    """The path under which `target` is being written."""
    return target.with_name(f".{target.name}.new")


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
    """Delete a directory if it exists, and the remains of deletions beside it that a crash interrupted."""
    if target.exists():
        os.rename(target, target.with_name(f".{target.name}.old"))
    for remains in target.parent.glob(".*.old"):
        shutil.rmtree(remains)
