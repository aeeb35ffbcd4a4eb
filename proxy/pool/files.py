"""Files that a reader sees whole or not at all, and locks of one process at a time. For every package.

Left out: directories that must survive a power failure (trainer/megatron/atomic_dir.py).
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_SECONDS = 0.1
LEFT_SECONDS = 5.0
"""How long a killed holder may still seem to hold its lock: a child that it was just starting has the descriptor until
it executes its program, which takes a moment on a busy machine."""


class InUse(Exception):
    """Another living process has the lock of a file or directory."""

    def __init__(self, path: Path, holder: str):
        super().__init__(f"{path} is in use by process {holder or 'unknown'}")
        self.holder = holder
        """Its process id; empty where it has not written that yet."""


@contextmanager
def replacing(file: Path, private: bool = False, durable: bool = False) -> Iterator[Path]:
    """Yield a path to write to; it takes the place of `file` at the end of the block, in one step.

    So a reader sees the old file or the new one, never a part. If the block fails, the old one stays. `private`: only
    this user may read it. `durable`: synced, so that a power failure afterwards does not lose the new content.
    """
    partial = file.with_name(file.name + ".partial")
    try:
        if private:
            partial.touch()
            partial.chmod(0o600)
        yield partial
        if durable:
            sync(partial)
        partial.replace(file)
        if durable:
            sync(file.parent)
    finally:
        with suppress(OSError):  # gone, by the step above or because it could not be made
            partial.unlink()


def write_whole(file: Path, content: bytes, private: bool = False) -> None:
    """Write a file in one step, as `replacing` does."""
    with replacing(file, private) as partial:
        partial.write_bytes(content)


def sync(path: Path) -> None:
    """Force a file's data, or a directory's entries, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_directory(directory: Path, patience_seconds: float = 0) -> int:
    """Create a directory and lock it by the file `lock` in it, as `lock_file` does. OSError when it cannot be used."""
    directory.mkdir(parents=True, exist_ok=True)
    return lock_file(directory / "lock", directory, patience_seconds)


def lock_file(file: Path, locked: Path, patience_seconds: float = 0) -> int:
    """Lock a file that stands for `locked`, and return the descriptor that holds the lock until it is closed.

    The lock is the kernel's (flock): it ends with its holder, however that ends, so no crash leaves one behind. InUse
    when another process holds it for longer than the patience. OSError when the file cannot be made.
    """
    deadline = time.monotonic() + patience_seconds
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(lock, 100, 0).decode(errors="replace").strip()
            if time.monotonic() >= deadline + (LEFT_SECONDS if _gone(holder) else 0):
                os.close(lock)
                raise InUse(locked, holder) from None
        time.sleep(POLL_SECONDS)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _gone(holder: str) -> bool:
    """Whether the process that wrote its id into a lock has ended."""
    return holder.isdigit() and not Path(f"/proc/{holder}").exists()
