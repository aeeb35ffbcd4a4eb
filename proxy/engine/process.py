"""Starts and stops child processes that never outlive their parent, each with its whole process group."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from proxy.pool.processes.parent import die_with_parent

PORTS = range(20000, 30000)
"""Where our servers listen. Linux gives outgoing connections ports from 32768 on. A port from there that is free now
can be a connection's by the time a server binds it, which SGLang does half a minute after its start."""


def start(command: Sequence[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, its output appended to the log. Call from the main thread."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def stop(process: subprocess.Popen[bytes], grace_seconds: float = 1) -> None:
    """End the process and its whole group: SIGTERM first, SIGKILL after the grace."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)  # also for members that outlived the leader
    process.wait()


def mapped_files(group: int, prefix: str) -> set[Path]:
    """Files that a process of the group has mapped, of those whose path starts with the prefix."""
    files = set()
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if os.getpgid(int(directory.name)) == group:
                lines = (directory / "maps").read_text().splitlines()
                files |= {Path(line[line.index(prefix) :]) for line in lines if prefix in line}
    return files


def free_port() -> int:
    """A free loopback port of `PORTS`, drawn at random so that two callers rarely get the same one."""
    return next(port for port in random.sample(PORTS, len(PORTS)) if is_free(port))


def is_free(port: int) -> bool:
    """Whether a server could listen on the loopback port now."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's port is free
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def newest_text(log: Path, most_bytes: int, since: int = 0) -> str:
    """The end of a log, of what stands behind its first `since` bytes; empty where there is none yet."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(max(since, log.stat().st_size - most_bytes))
        return file.read().decode(errors="replace")
    return ""


def end_of(log: Path) -> str:
    """The last lines of a log on one line, for an error message."""
    text = newest_text(log, 4000)
    return " | ".join(line.strip() for line in text.splitlines() if line.strip()).split(" | ", 1)[-1][-600:] or "empty"
