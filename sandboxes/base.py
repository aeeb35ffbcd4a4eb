"""What a sandbox is, whatever it is made of: a few verbs, and limits that name what they ended.

Paths are relative to the sandbox's working directory, or to its home when they begin with `~/`; none leads outside.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Ended = Literal["exit", "timeout", "cpu", "memory"]


class SandboxError(Exception):
    """A sandbox could not do what was asked: one sentence."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one command may use, counted over every process of its sandbox."""

    seconds: float = 600
    """Wall time of the command."""
    cpu_seconds: float | None = None
    """CPU time of the processes that are alive and the children they have waited for. None: unlimited."""
    memory_mb: int | None = None
    """Resident memory. None: unlimited."""
    output_bytes: int = 1 << 20
    """Bytes of output that are kept: the first and the last half; what lies between is dropped and counted."""


@dataclass(frozen=True)
class Result:
    """How a command ended. `exit_code` is negative for a signal; anything but `exit` was ended by that limit."""

    ended: Ended
    exit_code: int
    output: str
    """What it wrote to stdout and stderr, in order."""
    dropped: int
    """Bytes of output beyond the limit."""
    seconds: float


class Sandbox(Protocol):
    """One place to run commands in."""

    id: str
    work: str
    """The working directory, as the sandbox's processes see it."""
    home: str

    async def run(self, command: str, limits: Limits, env: Mapping[str, str]) -> Result:
        """Run a shell command to its end. What it left running stays until `end_processes`, unless a limit ended it."""

    async def end_processes(self) -> int:
        """End everything that runs in the sandbox, daemons too, and say how many processes that were."""

    def write(self, path: str, content: str | bytes) -> None:
        """Write a file and its parents. Whatever stands in the way is replaced; links are not followed."""

    def read(self, path: str, limit: int = 1 << 20) -> bytes | None:
        """The first bytes of a regular file; None when there is no such file."""

    def put(self, source: Path, path: str) -> None:
        """Copy a directory into the sandbox."""

    def get(self, path: str, target: Path) -> None:
        """Copy a directory out of the sandbox."""

    async def stop(self) -> None:
        """End everything and remove the sandbox. May be called again."""


class Sandboxes(Protocol):
    """A kind of sandbox."""

    async def start(self) -> Sandbox:
        """A fresh sandbox; SandboxError when there can be none."""
