"""The demo's end: its runs in the browser, while somebody sits at the terminal."""

import os
import sys
from pathlib import Path

from rich.console import Console

BIN = Path(sys.executable).parent


def show(pool: Path, console: Console) -> None:
    """Become `proxy dashboard`, which prints its address and serves until Ctrl-C.

    Where nobody would press Ctrl-C (no terminal, a job in the background, CI), only print the command.
    """
    command = ["proxy", "dashboard", str(pool)]
    if not somebody_is_here():
        console.print(f"look at its runs in the browser: {' '.join(command)}", highlight=False, soft_wrap=True)
        return
    console.print("look at its runs in the browser, until you press Ctrl-C:")
    sys.stdout.flush()
    os.execv(BIN / command[0], command)


def somebody_is_here() -> bool:
    """Whether this process has a terminal and is in its foreground."""
    if os.environ.get("CI") or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # the terminal is not this process' own
        return False
