"""A run's directory: who uses it, what it was started with, its logs and its results.

The lock is the kernel's (flock), so it is gone with its holder, however that one ended.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from proxy.pool.errors import UserError
from proxy.pool.groups import RolloutRow


class RunDir:
    """The directory of one run."""

    def __init__(self, path: Path):
        self.path = path.absolute()
        self.logs = self.path / "logs"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the directory; UserError when a living process has it."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            lock = open(self.path / "lock", "a+")
        except OSError as error:
            raise UserError(f"the run directory {self.path} cannot be used ({error.strerror}); name another") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read().strip()
                raise UserError(
                    f"the run directory {self.path} is in use by process {holder}; wait for it or name another"
                ) from None
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    def resumes(self, config: dict[str, Any]) -> bool:
        """Whether a run was begun here; UserError when it was begun with another configuration."""
        file = self.path / "run.json"
        if not file.exists():
            return False
        kept = msgspec.json.decode(file.read_bytes())
        for key, value in config.items():
            if kept.get(key) != value:
                raise UserError(
                    f"the run directory {self.path} was started with {key} {kept.get(key)!r}, now it is {value!r}; "
                    "repeat the old setting to resume or name another directory with --run-dir"
                )
        return True

    def begin(self, config: dict[str, Any]) -> None:
        """Keep what the run is started with, once it can start: a first try that came to nothing binds nobody."""
        write_whole(self.path / "run.json", msgspec.json.format(msgspec.json.encode(config)))

    def write_results(self, rows: list[RolloutRow]) -> Path:
        """One line per rollout into results.jsonl."""
        file = self.path / "results.jsonl"
        write_whole(file, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return file


def write_whole(file: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or the old one."""
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(content)
    partial.replace(file)
