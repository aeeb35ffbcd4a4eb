"""What a sandbox is, whatever it is made of: a spec, a few verbs, and limits that name what they ended.

Paths are relative to the sandbox's working directory, or to the user's home when they begin with `~/`; none leads
outside. An absolute path is one of the sandbox's own file system, where it has one (Docker); elsewhere it is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

Ended = Literal["exit", "timeout", "cpu", "memory"]
Profile = Literal["strict", "harbor"]
Network = Literal["model", "none", "full"]
User = Literal["agent", "verifier", "root"]
MAX_COPY_MB = 16384
"""Of a directory that is copied out where `disk_mb` does not say less."""


class SandboxError(Exception):
    """A sandbox could not do what was asked: one sentence."""


class ImageError(SandboxError):
    """An image is missing or cannot be built: every sandbox of this image will fail."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """What a sandbox's file system begins as. Built at most once per content."""

    name: str = ""
    """An image of the daemon, when nothing is built."""
    context: Path | None = None
    """A directory to build from; what is not named in the Dockerfile does not matter."""
    dockerfile: str = "Dockerfile"
    """Relative to `context`. Where there is none, the files are copied into the working directory of `name`."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """What runs beside a sandbox, in the same network: a database, say."""

    name: str
    """Under which the sandbox finds it; it listens on a port that nothing else of the sandbox has."""
    image: Image
    command: tuple[str, ...] = ()
    """Arguments; empty: the image's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    ready: str = ""
    """Shell command, in the service, that exits with 0 when it is ready. Empty: as soon as it runs."""
    ready_seconds: float = 60


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a sandbox is to be. Each default is the strictest; a task relaxes one by naming it."""

    image: Image | None = None
    """None: the back end's own default."""
    profile: Profile = "strict"
    """strict: unprivileged, read-only root, no capabilities. harbor: root of a user namespace, writable root."""
    network: Network = "model"
    """model: the proxy's model routes and nothing else."""
    work: str | None = None
    """Working directory where the sandbox has a file system of its own; None: the image's."""
    memory_mb: int | None = 4096
    """Resident memory of all its processes together. None: unlimited."""
    cpus: float | None = None
    pids: int | None = 1024
    disk_mb: int | None = 4096
    """Of each writable place: working directory, home, temporary files."""
    agent: str | None = None
    """The agent whose bundle is brought along, read-only."""
    env: Mapping[str, str] = field(default_factory=dict)
    services: tuple[Service, ...] = ()
    """Started in this order, each with the same limits as the sandbox."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one command may use, counted over every process of its sandbox."""

    seconds: float = 600
    """Wall time of the command."""
    cpu_seconds: float | None = None
    """CPU time of the processes that are alive and the children they have waited for. None: unlimited."""
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


OnOutput = Callable[[bytes], None]
"""Called with each piece of output as it comes."""


class Sandbox(Protocol):
    """One place to run commands in."""

    id: str
    work: str
    """The working directory, as the sandbox's processes see it."""
    home: str
    """The agent's home; others have their own where users are separated."""
    model_url: str
    """The proxy as the sandbox reaches it, without /v1; empty where its network is `none`."""
    bundles: str
    """The directory of agents' bundles, as the sandbox sees it."""
    own_root: bool
    """Whether its file system is its own. False: /etc, /usr and the like are this machine's and can be damaged."""

    async def run(
        self,
        command: str,
        limits: Limits,
        env: Mapping[str, str],
        user: User = "agent",
        on_output: OnOutput | None = None,
    ) -> Result:
        """Run a shell command to its end. What it left running stays until `end_processes`, unless a limit ended it."""

    async def keep_processes(self) -> None:
        """What runs now is the task's own (its daemons): `end_processes` spares it."""

    async def end_processes(self) -> int:
        """End everything that runs in the sandbox, daemons too, and say how many processes that were."""

    async def allow_network(self) -> None:
        """From now on it reaches whatever the daemon's host reaches: for a verifier, when no agent runs any more."""

    async def write(self, path: str, content: str | bytes, user: User = "agent") -> None:
        """Write a file and its parents. Whatever stands in the way is replaced; links are not followed."""

    async def read(self, path: str, limit: int = 1 << 20, user: User = "agent") -> bytes | None:
        """The first bytes of a regular file; None when there is no such file that the user may read."""

    async def put(self, source: Path, path: str, user: User = "agent") -> None:
        """Copy a directory into the sandbox."""

    async def get(self, path: str, target: Path, user: User = "agent") -> None:
        """Copy a directory out of the sandbox, as far as the user may read it; at most `disk_mb`."""

    async def changed(self) -> Mapping[str, bool]:
        """Absolute paths of the image that were changed (False) or removed (True), whoever asks from inside: told from
        outside. Nothing where the root cannot be written."""

    async def restore(self, paths: Sequence[str]) -> None:
        """Put these paths back as the image has them, without help from inside."""

    async def stop(self) -> None:
        """End everything and remove the sandbox. May be called again."""


class Sandboxes(Protocol):
    """A kind of sandbox."""

    @property
    def kind(self) -> str:
        """docker, bubblewrap or process."""

    @property
    def promise(self) -> str:
        """What it isolates and what not, in one sentence."""

    async def start(self, spec: Spec) -> Sandbox:
        """A fresh sandbox; SandboxError when there can be none."""

    async def close(self) -> None:
        """Remove what the sandboxes shared (relays, networks, spare ones). Called when all have been stopped."""
