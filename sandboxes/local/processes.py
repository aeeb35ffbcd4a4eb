"""The processes of this machine, as /proc shows them, and which of them belong to a sandbox.

Every process of a sandbox carries BLACKFORGE_SANDBOX=<id> in its environment, so daemons that left the session and were
adopted by init are found all the same. A process also belongs if a process of the sandbox is its parent, or if it is in
the session of one of the sandbox's commands. Left out: a process that has cleared its environment, opened a session and
lost its parent, all three, is not found. One that is just being exchanged for another program (execve) has no
environment for a moment: it is told apart, so that who ends processes looks again.
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
"""The kernel's number of the process namespace that a machine starts with."""
_TICKS = os.sysconf("SC_CLK_TCK") if sys.platform == "linux" else 100
_PAGE = os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 4096


@dataclass(frozen=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    session: int
    started: int
    """Clock ticks since boot: with the pid, the process' name for ever."""
    cpu_seconds: float
    memory_bytes: int
    sandbox: str
    """The sandbox that its environment names, or nothing."""
    starting: bool = False
    """It is within execve: its environment is not there yet."""


def now_ticks() -> int:
    """The time as processes' starts are told. What starts from now on has at least this."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS)


def table(since: int = 0) -> list[Process]:
    """Every living process that we may look at, or of them those that started since then, which costs half."""
    return [process for name in os.listdir("/proc") if name.isdigit() and (process := _process(name, since))]


def processes_of(processes: Collection[Process], sandbox: str, sessions: Collection[int] = ()) -> list[Process]:
    """The processes of one sandbox."""
    own = {process.pid for process in processes if process.sandbox == sandbox or process.session in sessions}
    grown = True
    while grown:
        children = {process.pid for process in processes if process.parent in own} - own
        own |= children
        grown = bool(children)
    return [process for process in processes if process.pid in own]


def kill(sandbox: str, sessions: Collection[int] = (), since: int = 0) -> tuple[list[Process], list[Process]]:
    """Send SIGKILL to a sandbox's processes. Returns them, and those that are starting: nobody can place them yet.

    To be repeated until none is found, as a fork may have slipped through. `since`: when the sandbox was made; what is
    older is not looked at.
    """
    processes = table(since)
    own = processes_of(processes, sandbox, sessions)
    for process in own:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return own, [process for process in processes if process.starting]


def namespace(pid: int | str = "self") -> str:
    """The number of the namespace that a process' pid is of; empty when we may not know."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid").removeprefix("pid:[").removesuffix("]")
    except OSError:
        return ""


def start_of(pid: int) -> int | None:
    """When the living process of this pid started, in ticks since boot; None when there is none."""
    process = _process(str(pid))
    return None if process is None else process.started


def hidden(pid: int) -> bool:
    """Whether another user's process has this pid and /proc does not show it (mounted with hidepid)."""
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
    """Whether a process that shows no environment will show one.

    It has memory, so it is no kernel thread, and it is not one without any, whose place for it is known and empty
    (fields 50 and 51). Of one that we may not look into, nothing is known.
    """
    first, last = fields[47:49]
    if fields[20] == b"0" or first == last != b"0":
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
