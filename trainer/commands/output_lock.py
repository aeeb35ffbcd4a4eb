"""One trainer per output directory. The lock is that of proxy/pool/files.py: it ends with the process that holds it."""

from pathlib import Path

from proxy.pool.errors import UserError
from proxy.pool.files import InUse, lock_directory


def lock_output(output: Path, seconds: float = 10) -> int:
    """Lock an output directory while this process lives, and return the lock's file descriptor.

    Waits up to `seconds`, since a trainer that was just killed may linger. Raises UserError when another one works.
    """
    try:
        return lock_directory(output, seconds)
    except InUse:
        raise UserError(f"another trainer is using {output}; stop it or set another output") from None
    except OSError as error:
        raise UserError(f"the output directory {output} cannot be used ({error.strerror}); name another") from error
