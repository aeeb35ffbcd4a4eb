"""Finds the shims that a killed Docker daemon left on this machine: processes that held a container which has ended.

A container's shim belongs to containerd, not to us, and tells nobody whose its container was. So it is named, for
somebody to end it by hand, and not ended. Left out: shims whose container runs on; a daemon that is started again finds
these.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.local.processes import now_ticks, table, ticks

SETTLED_SECONDS = 60.0
"""A shim that is younger may be about to start its container, or to end with it."""


@dataclass(frozen=True)
class IdleShim:
    """A shim without a process."""

    pid: int
    container: str

    def __str__(self) -> str:
        return (
            f"process {self.pid} is the shim of the container {self.container[:12]}, which ended without its daemon; "
            f"end it by hand: kill -9 {self.pid}"
        )


def idle_shims(settled_seconds: float = SETTLED_SECONDS) -> Iterator[IdleShim]:
    """Yield the shims of this machine that have had no process for a while."""
    processes = table()
    parents = {process.parent for process in processes}
    for process in processes:
        if process.pid in parents or process.started > now_ticks() - ticks(settled_seconds):
            continue
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if Path(words[0]).name.startswith("containerd-shim") and "-id" in words[:-1]:
            yield IdleShim(process.pid, words[words.index("-id") + 1])
