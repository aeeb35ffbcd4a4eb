"""A child process that does not outlive its parent. For every package."""

import ctypes
import signal
import sys

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # loaded before any fork, see below
_PR_SET_PDEATHSIG = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process the signal when the thread that started it ends. Does nothing but on Linux.

    Safe as subprocess' `preexec_fn`: between fork and exec, where other threads may have held any lock, it only makes
    one system call.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
