"""The process table of this machine from /proc, and which processes belong to a sandbox.

Every process of a sandbox carries BLACKFORGE_SANDBOX=<id> in its environment, which also identifies background
processes that left the session and were adopted by init. A process also belongs if its parent does, or if it is in the
session of one of the sandbox's commands. A process escapes only by clearing its environment, opening a session and
losing its parent, all three. During execve a process has no environment for a moment: it counts as `starting`, so that
whoever ends processes looks again.
"""

import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

MARK = "BLACKFORGE_SANDBOX"
_MARK = MARK.encode() + b"="
FIRST_NAMESPACE = "4026531836"
"""The kernel's number of a machine's first process namespace."""
_TICKS = os.sysconf("SC_CLK_TCK") if sys.platform == "linux" else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 4096


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    started: int
    """Clock ticks since boot. Pid and start time together never name another process."""
    cpu_seconds: float
    memory_bytes: int
    sandbox: str
    """Id of the sandbox that its environment names; empty if none."""
    starting: bool = False
    """Whether it is within execve, when its environment is not there yet."""


def now_ticks() -> int:
    """Return the time in the unit of start times: a process that starts from now on has at least this."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)


def ticks(seconds: float) -> int:
    """Return a duration in the unit of start times."""
    return int(seconds * _TICKS)


def table(since: int = 0) -> list[Process]:
    """Return every living process that we may read. `since`: only those that started from then on, at half the cost."""
    return [process for name in os.listdir("/proc") if name.isdigit() and (process := _process(name, since))]


def processes_of(processes: Collection[Process], sandbox: str, sessions: Collection[int] = ()) -> list[Process]:
    """Return the processes of one sandbox."""
    own = {process.pid for process in processes if process.sandbox == sandbox or process.session in sessions}
    grown = True
    while grown:
        children = {process.pid for process in processes if process.parent in own} - own
        own |= children
        grown = bool(children)
    return [process for process in processes if process.pid in own]


def kill(sandbox: str, sessions: Collection[int] = (), since: int = 0) -> tuple[list[Process], list[Process]]:
    """Send SIGKILL to a sandbox's processes. Return them, and those that are starting: theirs is not known yet.

    Repeat it until there are none, as a fork may slip through. `since`: when the sandbox was created; older processes
    are skipped.
    """
    processes = table(since)
    own = processes_of(processes, sandbox, sessions)
    for process in own:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return own, [process for process in processes if process.starting]


def namespace(pid: int | str = "self") -> str:
    """Return the number of a process's pid namespace; empty when we may not read it."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid").removeprefix("pid:[").removesuffix("]")
    except OSError:
        return ""


def start_of(pid: int) -> int | None:
    """Return when the process of this pid started, in ticks since boot; None when none is alive."""
    process = _process(str(pid))
    return None if process is None else process.started


def hidden(pid: int) -> bool:
    """Return whether another user's process has this pid and /proc hides it (mounted with hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not _read(f"/proc/{pid}/stat", 1)
    except (OSError, OverflowError):
        return False
    return False


def _process(pid: str, since: int = 0) -> Process | None:
    stat = _read(f"/proc/{pid}/stat", 4096)
    # the name may hold blanks and brackets; fields are counted from the last bracket (proc(5), from field 3 on)
    fields = stat[stat.rfind(b")") + 2 :].split()
    if len(fields) < 50 or fields[0] in (b"Z", b"X") or int(fields[19]) < since:
        return None
    environment = _read(f"/proc/{pid}/environ", 1 << 18)
    return Process(
        pid=int(pid),
        parent=int(fields[1]),
        session=int(fields[3]),
        started=int(fields[19]),
        cpu_seconds=sum(map(int, fields[11:15])) / _TICKS,
        memory_bytes=int(fields[21]) * _PAGE,
        sandbox=_sandbox(environment),
        starting=not environment and _starting(pid, fields),
    )


def _starting(pid: str, fields: list[bytes]) -> bool:
    """Return whether a process that shows no environment will have one.

    It will if it has memory (so it is no kernel thread) and its environment's place is not set yet (fields 50 and 51 of
    proc(5)). The kernel sets that to an empty place first, and the place of the code (field 26) only after the
    environment, so an empty place counts once there is code. False for a process that we may not read.
    """
    code, first, last = fields[23], fields[47], fields[48]
    if fields[20] == b"0" or (first == last != b"0" and code != b"0"):
        return False
    try:
        os.close(os.open(f"/proc/{pid}/environ", os.O_RDONLY))
    except OSError:
        return False
    return True


def _sandbox(environment: bytes) -> str:
    at = environment.find(_MARK)
    if at < 0 or (at > 0 and environment[at - 1] != 0):
        return ""
    return environment[at + len(_MARK) :].split(b"\0", 1)[0].decode(errors="replace")


def _read(path: str, limit: int) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:  # gone, or not ours
        return b""
    try:
        return os.read(file, limit)
    except OSError:
        return b""
    finally:
        os.close(file)
