"""The files of a SQLite pool: only their owner may read them, and their loss is noticed.

SQLite goes on writing to a file that somebody has deleted, moved or replaced, and everything that it commits there is
lost. So each connection remembers which files it has opened, and each transaction compares them with those that have
the names now. Never open these files here: closing one drops the locks that SQLite holds on it in this process (POSIX).
"""

import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

WITH_LOG = ("", "-wal", "-shm")
"""What is appended to a pool's name for the database, its write-ahead log, and the log's index."""
KEY = "files of the pool"
"""Where a connection remembers its files."""

Identity = tuple[int, int] | None
"""Device and inode of a file; None where there is none."""


class PoolFileLost(sqlite3.OperationalError):
    """The files with the pool's names are not the ones that this process has opened."""


class PoolFile:
    """The files of one pool, in one process."""

    def __init__(self, file: Path):
        self._file = file
        self._names = [f"{file}{ending}" for ending in WITH_LOG]
        self._opened: Identity = None

    def connecting(self, *_: Any) -> None:
        """Refuse a new connection to a pool that is gone: SQLite would make an empty one of the same name."""
        if self._opened and self._identities()[0] != self._opened:
            raise self._lost()

    def connected(self, _connection: Any, record: Any) -> None:
        """Remember what a new connection has opened."""
        record.info[KEY] = identities = self._identities()
        if (self._opened or identities[0]) != identities[0]:
            raise self._lost()
        self._opened = identities[0]

    def check(self, info: dict[Any, Any]) -> None:
        """Raise PoolFileLost when the files of a connection are no longer those of the pool."""
        now = self._identities()
        if info[KEY] == now:
            return
        # SQLite opens the log when a connection first needs it.
        info[KEY] = opened = [earlier or identity for earlier, identity in zip(info[KEY], now, strict=True)]
        if opened != now:
            raise self._lost()

    def _identities(self) -> list[Identity]:
        try:
            return [(status.st_dev, status.st_ino) for status in map(os.stat, self._names)]
        except OSError:  # at least one is missing
            return [_identity(name) for name in self._names]

    def _lost(self) -> PoolFileLost:
        lost = f"{self._file}, -wal or -shm was deleted, moved or replaced while it was in use"
        return PoolFileLost(f"{lost}; put it back, or restart with another pool")


def make_private(file: Path, create: bool) -> None:
    """Let nobody but its owner read a pool, also one that was made before; make an empty one if it is missing."""
    if create:
        with suppress(FileExistsError):
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    for ending in WITH_LOG:
        with suppress(OSError):  # there is none, or it is another user's
            mode = os.stat(f"{file}{ending}").st_mode
            if mode & 0o077:
                os.chmod(f"{file}{ending}", mode & 0o700)


def _identity(name: str) -> Identity:
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_dev, status.st_ino
