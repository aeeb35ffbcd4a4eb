"""The interface of all sandboxes: a spec, a few verbs, and limits whose results say which limit ended a command.

Paths are relative to the sandbox's working directory, or to the user's home if they begin with `~/`; none may lead
outside. An absolute path belongs to the sandbox's own file system, where it has one (Docker); elsewhere it is refused.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, Protocol

Ended = Literal["exit", "timeout", "cpu", "memory"]
Profile = Literal["strict", "harbor"]
Network = Literal["model", "none", "full"]
User = Literal["agent", "verifier", "root"]
MAX_COPY_MB = 16384
"""Maximum size of a directory that is copied out, unless `disk_mb` is smaller."""


class SandboxError(Exception):
    """A sandbox could not do what was asked. The message is one sentence."""


class TooMuchToCopy(SandboxError):
    """A place holds more than may be copied out of the sandbox. Another try would find the same."""


class ImageError(SandboxError):
    """An image is missing or cannot be built, so every sandbox of this image will fail."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """The image that a sandbox's file system starts from. Built at most once per content."""

    name: str = ""
    """Name of an image, on the daemon or in a registry; empty when one is built from `context` alone."""
    context: Path | None = None
    """Directory to build from. None: nothing is built."""
    dockerfile: str = "Dockerfile"
    """Relative to `context`. Where there is none, the files are copied into the working directory of `name`."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A container beside a sandbox, in the same network: a database, for example."""

    name: str
    """Host name under which the sandbox reaches it. Its port must differ from all others in the sandbox."""
    image: Image
    command: tuple[str, ...] = ()
    """Arguments of its program. Empty: those of the image."""
    env: Mapping[str, str] = field(default_factory=dict)
    ready: str = ""
    """Shell command, run in the service, that exits with 0 once it is ready. Empty: it is ready once it runs."""
    ready_seconds: float = 60


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Describes a sandbox to start. Each default is the strictest; a task relaxes one by naming it."""

    image: Image | None = None
    """None: the default image of the back end."""
    profile: Profile = "strict"
    """strict: unprivileged, read-only root, no capabilities. harbor: root of a user namespace, writable root."""
    network: Network = "model"
    """model: only the proxy's model routes. none: nothing. full: the Internet, in Docker nothing private or near."""
    reach: tuple[str, ...] = ()
    """Networks (ADDRESS or ADDRESS/BITS) that a `full` network reaches although they are private or near."""
    work: str | None = None
    """Working directory, where the sandbox has its own file system. None: that of the image."""
    memory_mb: int | None = 4096
    """Resident memory of all its processes together. None: unlimited."""
    cpus: float | None = None
    pids: int | None = 1024
    disk_mb: int | None = 4096
    """Size of each writable place: working directory, home, temporary files. None: unlimited."""
    system_calls: tuple[str, ...] = ()
    """Names of system calls that the sandbox's filter refuses everywhere else."""
    agent: str | None = None
    """The agent whose bundle is mounted, read-only. None: no agent."""
    env: Mapping[str, str] = field(default_factory=dict)
    services: tuple[Service, ...] = ()
    """Started in this order. Each has the same limits as the sandbox."""
    beside: bool = False
    """Runs a verifier while the agent's sandbox waits for it. Starts at once, even where the host is at its limit."""
    first: bool = False
    """Runs a verifier after the agent's sandbox has ended. Takes the freed place before any other start."""


async def no_seconds() -> float:
    """Excuse nothing."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one command, counted over all processes of its sandbox."""

    seconds: float = 600
    """Wall time of the command."""
    excused: Callable[[], Awaitable[float]] = no_seconds
    """Asked when the wall time seems to be up: seconds since the command began that do not count."""
    cpu_seconds: float | None = None
    """CPU time of the processes alive, with the children that they have waited for. None: unlimited."""
    output_bytes: int = 1 << 20
    """Bytes of output to keep: the first and the last half. The bytes between are dropped and counted."""


@dataclass(frozen=True)
class Result:
    """How a command ended: by itself (`exit`) or by a limit. `exit_code` is negative for a signal."""

    ended: Ended
    exit_code: int
    output: str
    """Its stdout and stderr, in the order of writing."""
    dropped: int
    """Bytes of output that were dropped."""
    seconds: float
    cut: bool = False
    """Whether the end of the output was lost on the way here. The output says so, too."""


OnOutput = Callable[[bytes], None]
"""Called with each piece of output as it arrives."""


class Sandbox(Protocol):
    """One isolated place to run commands in."""

    id: str
    work: str
    """The working directory, as the sandbox's processes see it."""
    home: str
    """The agent's home. Other users have their own where users are separated."""
    model_url: str
    """URL of the proxy as the sandbox reaches it, without /v1. Empty where its network is `none`."""
    bundles: str
    """The directory of agents' bundles, as the sandbox sees it."""
    own_root: bool
    """Whether its file system is its own. False: /etc, /usr and the like are this machine's and can be damaged."""

    def account(self, user: User) -> tuple[str, str] | None:
        """Return a user's home and the `uid:gid` of its files, where commands of `root` can write for it; else None."""

    async def run(
        self,
        command: str,
        limits: Limits,
        env: Mapping[str, str],
        user: User = "agent",
        on_output: OnOutput | None = None,
    ) -> Result:
        """Run a shell command to its end. Background processes stay until `end_processes`, unless a limit ended it.

        SandboxError when the command cannot be run.
        """

    async def keep_processes(self) -> None:
        """Mark all running processes as the task's own background processes, which `end_processes` spares."""

    async def alone(self) -> bool:
        """Whether a look finds nothing but its main process. False where nobody can look without a command inside.

        Only where no agent has run: what forks without end may go unseen.
        """

    async def end_processes(self) -> int:
        """End all processes in the sandbox, also those in the background, and return how many they were."""

    async def allow_network(self) -> None:
        """Give it the network of the daemon's host. For a verifier, once no agent runs any more."""

    async def write(self, path: str, content: str | bytes, user: User = "agent") -> None:
        """Write a file and its parent directories. Replace whatever stands in the way; follow no links."""

    async def read(self, path: str, limit: int = 1 << 20, user: User = "agent") -> bytes | None:
        """Return the first `limit` bytes of a regular file; None when there is none that the user may read."""

    async def put(self, source: Path, path: str, user: User = "agent") -> None:
        """Copy a directory into the sandbox."""

    async def get(self, path: str, target: Path, user: User = "agent") -> None:
        """Copy what the user may read of a directory out of the sandbox. SandboxError above `disk_mb`."""

    async def freeze(self) -> None:
        """Halt all processes at once, from outside. Then only `pack`, `changed`, `restore` and `stop` work.

        `thaw` or `restart` ends that state. May be called more than once.
        """

    async def thaw(self) -> None:
        """Let frozen processes go on, where they still live."""

    async def restart(self) -> None:
        """End all processes from outside, also those that are kept, without asking anything inside. The files stay.

        Not for a sandbox with services, which would lose its network.
        """

    async def run_in_service(self, service: str, command: str, limits: Limits) -> Result:
        """Run a shell command in a service, as the user and in the directory of its image. SandboxError without it.

        The exit code is -1 where it cannot run, or takes too long: then it is left to the service.
        """

    async def pack(self, path: str, archive: IO[bytes], limit: int, service: str = "") -> bool:
        """Write the file or directory at a path as a tar archive, read from outside and through no link of an agent.

        Each name begins with one component that stands for `path`. False when nothing is there. SandboxError when the
        archive gets larger than `limit` bytes. Call it on a frozen sandbox, or where no agent has run. `service`: the
        path, an absolute one, lies in this service.
        """

    async def changed(self) -> Mapping[str, bool]:
        """Return the absolute paths of the image that were changed (False) or removed (True).

        Asked from outside, so that nobody inside can lie about it. Empty where the root cannot be written.
        """

    async def restore(self, paths: Sequence[str]) -> None:
        """Restore these paths from the image, without running anything inside."""

    async def stop(self) -> None:
        """End all processes and remove the sandbox. May be called more than once."""


class Sandboxes(Protocol):
    """A kind of sandbox."""

    @property
    def kind(self) -> str:
        """docker, bubblewrap or process."""

    @property
    def promise(self) -> str:
        """One sentence that says what it isolates and what it does not."""

    @property
    def away(self) -> str:
        """A sentence while nothing can be started, because what starts sandboxes is away; else empty."""

    @property
    def away_seconds(self) -> float:
        """Seconds of all such absences so far."""

    @property
    def making(self) -> str:
        """Which image is pulled or built now, with its newest step and its seconds; empty when none is."""

    async def was_away(self, since: float, sandbox: Sandbox | None = None) -> bool:
        """Return whether it was away after `since` (time.monotonic()), after asking it whether it is there.

        `sandbox`: asks only about what runs this one.
        """

    async def until_there(self) -> None:
        """Wait until sandboxes can be started. SandboxError when that takes too long."""

    async def start(self, spec: Spec) -> Sandbox:
        """Start a new sandbox. SandboxError when that fails."""

    async def close(self) -> None:
        """Remove what the sandboxes share (relays, networks, spare sandboxes). Call it when all have been stopped."""
