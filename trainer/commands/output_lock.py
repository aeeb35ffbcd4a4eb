"""One trainer per output directory.

The lock is the kernel's (flock): it ends with the process that holds it, however that process ends, so a crash leaves
nothing to clean up.
"""

import fcntl
import os
import time
from pathlib import Path

from proxy.pool.errors import UserError


def lock_output(output: Path, seconds: float = 10) -> int:
    """Lock an output directory while this process lives, and return the lock's file descriptor.

    Waits up to `seconds`, since a trainer that was just killed may linger. Raises UserError when another one works.
    """
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
                raise UserError(f"another trainer is using {output}; stop it or set another output") from None
        time.sleep(0.1)
