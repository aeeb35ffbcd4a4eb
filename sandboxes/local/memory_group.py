"""Memory limits by the kernel for sandboxes without Docker: a control group for each, version 2 or 1.

The kernel counts everything there: memfd, shared memory and files in memory too, which belong to no process. Where no
group can be made (no rights, no controller), limits count the resident memory of processes instead (process.py).
"""

import os
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NAME = "blackforge-"
PATIENCE_SECONDS = 5.0
JOIN = 'echo $$ >"$1" || exit 126; shift; exec "$@"'
"""Shell script that enters a group and becomes another program. Arguments: file of the group's processes, program."""


@dataclass(frozen=True)
class MemoryGroup:
    """One control group."""

    directory: Path

    def enter(self, argv: list[str]) -> list[str]:
        """Return the command line that runs `argv` in this group."""
        return ["/bin/sh", "-c", JOIN, "sh", str(self.directory / "cgroup.procs"), *argv]

    def kills(self) -> int:
        """Return how many processes the kernel has ended for lack of memory."""
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                for line in (self.directory / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Remove it, once its processes have ended. Accept that it is gone."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.directory.exists() and time.monotonic() < deadline:
            try:
                return self.directory.rmdir()
            except OSError:  # the kernel still counts the last process
                time.sleep(0.01)


def make(sandbox: str, limit: int) -> MemoryGroup | None:
    """Make the group of a sandbox with a limit in bytes. None where that cannot be."""
    directory = _place(sandbox)
    if directory is None:
        return None
    try:
        directory.mkdir()
        if (directory / "memory.max").exists():
            (directory / "memory.max").write_text(str(limit))
            names = ["memory.swap.max"]
        else:
            (directory / "memory.limit_in_bytes").write_text(str(limit))
            names = ["memory.memsw.limit_in_bytes"]
        for name in names:
            with suppress(OSError):  # kernels without swap accounting do not have it
                (directory / name).write_text("0" if name == "memory.swap.max" else str(limit))
    except OSError:
        with suppress(OSError):
            directory.rmdir()
        return None
    return MemoryGroup(directory)


def left_by(sandboxes: Collection[str]) -> list[MemoryGroup]:
    """Return the groups of these sandboxes, wherever they lie: their owner may have been in another group than we."""
    names = {f"{NAME}{sandbox}" for sandbox in sandboxes}
    top = ROOT if (ROOT / "cgroup.controllers").exists() else ROOT / "memory"
    places = os.walk(top) if names else ()
    return [MemoryGroup(Path(place, name)) for place, below, _ in places for name in below if name in names]


def why_not() -> str:
    """Return what memory limits leave out here; empty where the kernel counts all memory."""
    group = make(f"probe-{os.getpid()}", 1 << 30)
    if group is None:
        return "memory limits leave out memfd and shared memory, because no control group can be made here"
    group.remove()
    return ""


def _place(sandbox: str) -> Path | None:
    """Return the directory of a sandbox's group: below our own (version 1), or beside it (version 2).

    In version 2 a group that holds processes cannot have groups with limits below it.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for _, controllers, path in (line.split(":", 2) for line in lines):
        own = path.lstrip("/")
        if "memory" in controllers.split(","):
            return ROOT / "memory" / own / f"{NAME}{sandbox}"
        if not controllers and (ROOT / "cgroup.controllers").exists():
            above = (ROOT / own).parent if own else ROOT
            with suppress(OSError):
                if "memory" in (above / "cgroup.subtree_control").read_text().split():
                    return above / f"{NAME}{sandbox}"
    return None
