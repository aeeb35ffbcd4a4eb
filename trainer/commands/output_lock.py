"""One trainer per output directory. The lock is the kernel's (flock), so it is gone with its holder."""

import fcntl
import os
import time
from pathlib import Path

from proxy.pool.errors import UserError


def hold(output: Path, seconds: float = 10) -> int:
    """Keep other trainers away from a directory while this process lives. One that was just killed may linger."""
    deadline = time.monotonic() + seconds
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = os.open(output / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"the output directory {output} cannot be used ({error.strerror}); name another") from error
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(f"another trainer works on {output}; stop it or set another output") from None
        time.sleep(0.1)
