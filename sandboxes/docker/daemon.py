"""The connection to a Docker daemon, and the translation of its errors into sentences.

The client is aiodocker: on the same daemon a create-exec-remove takes it as long as the docker SDK in threads, with
less than half of the CPU time (4.6 ms against 11.1) and without a thread for every command that waits. Every call is
bounded in time except a command, whose limits bound it. Left out: ssh:// addresses.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.execs import Exec
from aiodocker.stream import Stream

from sandboxes.base import SandboxError
from sandboxes.docker.client_config import DaemonEndpoint, config_directory, current_context
from sandboxes.docker.presence import DaemonPresence

SOCKETS = (Path("/var/run/docker.sock"), Path("/run/docker.sock"), Path.home() / ".docker/run/docker.sock")
OLDEST_API = (1, 41)
CALL_SECONDS = 300.0
"""Time limit of a call. A daemon that starts 200 containers at once takes a minute for the last one."""


HOOK_FAILED = "error running hook"
"""What Docker says where its own hook, which connects a container's network, has failed."""
START_TRIES, START_PAUSE_SECONDS = 3, 0.5
PAUSED = "is paused, unpause the container before exec"
"""What Docker says of a command in a container that it takes for paused."""
PAUSED_TRIES, PAUSED_PAUSE_SECONDS = 50, 0.1


class DaemonError(SandboxError):
    """The daemon is gone, too old or out of disk, so other sandboxes would fail there too."""


class CommandNotStarted(SandboxError):
    """A command never began to run."""


@dataclass(frozen=True, kw_only=True)
class ContainerCommand:
    """One process in a container."""

    argv: Sequence[str]
    user: str
    """uid:gid. Empty: the container's."""
    work: str = "/"
    """Empty: the container's working directory."""
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: AsyncIterator[bytes] | None = None
    """Its input. The command does not see the end of it, so it must know how much to read."""


class DockerDaemon:
    """A daemon that answers. `open` creates one."""

    def __init__(self, address: str, docker: aiodocker.Docker, connector: aiohttp.BaseConnector):
        self.address, self.docker = address, docker
        self._connector = connector
        self.presence = DaemonPresence(docker, address)
        self.remapped = False
        """Whether uid 0 inside is an unprivileged user outside."""
        self.first_id = 0
        """That user's id."""
        self.seccomp = False
        """Whether it can filter system calls."""
        self.runtimes: frozenset[str] = frozenset()
        self.local = False
        """Whether it runs on this machine; a socket may be forwarded from another."""
        self.cpus = 1

    @classmethod
    async def open(cls, address: str = "") -> "DockerDaemon":
        """Connect, by default to `usual_endpoint`. DaemonError when it cannot be used."""
        endpoint = _endpoint(address)
        url, connector = _connector(endpoint)
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS, sock_connect=20)
        daemon = cls(endpoint.address, aiodocker.Docker(url=url, connector=connector, timeout=timeout), connector)
        try:
            await daemon._look()
        except BaseException:  # also when cancelled: its connections must not stay open
            await daemon.close()
            raise
        return daemon

    async def _look(self) -> None:
        with self.translating_errors("asking for its version"):
            version = await self.docker.version()
            information = await self.docker.system.info()
        if tuple(map(int, version["ApiVersion"].split("."))) < OLDEST_API:
            oldest = ".".join(map(str, OLDEST_API))
            raise DaemonError(
                f"the Docker daemon at {self.address} speaks API {version['ApiVersion']}, and {oldest} is needed; "
                "update it to Docker 20.10 or later"
            )
        if information["OSType"] != "linux":
            raise DaemonError(f"the Docker daemon at {self.address} runs {information['OSType']}; use one of Linux")
        self.remapped = any("name=userns" in option for option in information["SecurityOptions"] or ())
        if self.remapped:  # the daemon keeps the containers of such users below ROOT/UID.GID
            first = Path(information["DockerRootDir"]).name.partition(".")[0]
            if not first.isdecimal():
                raise DaemonError(
                    f"the Docker daemon at {self.address} remaps users and does not say to which id (its directory is "
                    f"{information['DockerRootDir']}, not ROOT/UID.GID), so nobody could write in a sandbox; "
                    "use a daemon of Docker's own, or one without userns-remap"
                )
            self.first_id = int(first)
        self.seccomp = any("name=seccomp" in option for option in information["SecurityOptions"] or ())
        self.runtimes = frozenset(information.get("Runtimes") or ())
        self.cpus = information["NCPU"]
        self.local = self.address.startswith("unix://") and information.get("Name") == socket.gethostname()

    async def close(self) -> None:
        """Close the connections. Containers keep running."""
        await self.presence.close()
        await self.docker.close()
        await self._connector.close()

    def container(self, name: str) -> DockerContainer:
        return self.docker.containers.container(name)

    async def execute(self, container: str, command: ContainerCommand, sink: Callable[[bytes], None]) -> int:
        """Run a command to its end and return its exit code. `sink` gets each piece of its output.

        CommandNotStarted when it never began to run.
        """
        with self.translating_errors(f"a command in {container}"):
            execution = await self._exec(container, command)
            async with execution.start() as stream:
                reading = asyncio.create_task(_read(stream, sink))
                feeding = asyncio.create_task(_feed(stream, command.stdin))
                try:
                    while (
                        not feeding.done() and not reading.done()
                    ):  # the daemon would wait for input of a process that has ended
                        await asyncio.wait({reading, feeding}, timeout=1, return_when=asyncio.FIRST_COMPLETED)
                        if not (reading.done() or feeding.done() or (await execution.inspect())["Running"]):
                            break
                    else:
                        await reading
                finally:
                    await _end(reading, feeding)
            pause = 0.001
            while (state := await execution.inspect())["Running"]:  # the output ends some milliseconds earlier
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.02)
        if not state["Pid"]:
            if await self._has_ended(container):
                raise SandboxError(f"a command in {container}: the container is not running")
            raise CommandNotStarted(f"{command.argv[0]} could not be started in {container}; its image may lack it")
        return state["ExitCode"]

    async def _exec(self, container: str, command: ContainerCommand) -> Exec:
        """Create a command. Tried some times where the container is paused, as the daemon may only believe that.

        It notes that a container was paused a second time when the event comes, which may be after it has gone on.
        """
        for left in reversed(range(PAUSED_TRIES)):
            try:
                return await self.container(container).exec(
                    list(command.argv),
                    user=command.user,
                    environment=dict(command.env),
                    workdir=command.work,
                    stdin=command.stdin is not None,
                )
            except aiodocker.DockerError as error:
                if not left or PAUSED not in error.message:
                    raise
            await asyncio.sleep(PAUSED_PAUSE_SECONDS)
        raise AssertionError("the last try returns or raises")

    async def _has_ended(self, container: str) -> bool:
        """Whether a container has ended. The daemon notes the end up to a second after the container's processes."""
        with self.translating_errors(f"the state of {container}"):
            for _ in range(10):
                if not (await self.container(container).show())["State"]["Running"]:
                    return True
                await asyncio.sleep(0.1)
        return False

    @contextmanager
    def translating_errors(self, what: str) -> Iterator[None]:
        """Turn the client's errors into SandboxError or DaemonError with a sentence. `what`: what was being done."""
        try:
            yield
        except aiodocker.DockerError as error:
            raise self._sentence(what, error.status, error.message) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._sentence(what, 900, str(error) or type(error).__name__) from error

    def _sentence(self, what: str, status: int, message: str) -> SandboxError:
        if "no space left on device" in message.lower():
            return DaemonError(
                f"the Docker daemon at {self.address} is out of disk ({what}: {message}); "
                "free some, for example with `docker system prune`"
            )
        if status == 900:  # aiodocker's own status for a failed connection (0.27)
            return DaemonError(f"the Docker daemon at {self.address} does not answer ({message}); start it again")
        return SandboxError(f"{what}: {message.strip()}")


async def start_container(container: DockerContainer) -> None:
    """Start a container. Tried some times where Docker's hook fails, as it does at times on a busy machine (20.10)."""
    for left in reversed(range(START_TRIES)):
        try:
            return await container.start()
        except aiodocker.DockerError as error:
            if not left or HOOK_FAILED not in error.message:
                raise
            await asyncio.sleep(START_PAUSE_SECONDS)


async def _read(stream: Stream, sink: Callable[[bytes], None]) -> None:
    while (message := await stream.read_out()) is not None:
        sink(message.data)


async def _end(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _feed(stream: Stream, stdin: AsyncIterator[bytes] | None) -> None:
    if stdin is None:
        return
    try:
        async for chunk in stdin:
            await stream.write_in(chunk)
    except (ConnectionError, aiohttp.ClientError, RuntimeError):
        return  # the process has ended without reading everything: its exit code says why


def usual_endpoint() -> DaemonEndpoint | None:
    """Return the daemon that is meant where none is named: DOCKER_HOST, else the Docker context, else the local socket.

    None where there is none. DaemonError when the context cannot be read.
    """
    if address := os.environ.get("DOCKER_HOST"):
        return DaemonEndpoint(address=address)
    try:
        context = current_context()
    except SandboxError as error:
        raise DaemonError(str(error)) from error
    return context or next((DaemonEndpoint(address=f"unix://{path}") for path in SOCKETS if path.is_socket()), None)


def _endpoint(address: str) -> DaemonEndpoint:
    """Return the daemon at this address, with the certificates of the current context if it is that one's."""
    usual = usual_endpoint()
    if usual is not None and address in ("", usual.address):
        return usual
    if not address:
        raise DaemonError(f"there is no Docker daemon at {SOCKETS[0]}; start one, or set DOCKER_HOST")
    return DaemonEndpoint(address=address)


def _connector(endpoint: DaemonEndpoint) -> tuple[str, aiohttp.BaseConnector]:
    """Return the URL and a connector without a limit: each running command holds a connection for as long as it runs.

    DaemonError for an address or certificates that cannot be used.
    """
    address = endpoint.address
    scheme, _, rest = address.partition("://")
    if scheme == "unix":
        return "unix://localhost", aiohttp.UnixConnector(rest, limit=0)
    if scheme not in ("tcp", "http", "https"):
        raise DaemonError(
            f"the Docker daemon's address {address!r} begins with none of unix://, tcp:// and https://; "
            "reach one behind ssh by forwarding its socket: ssh -nNT -L /tmp/docker.sock:/var/run/docker.sock HOST"
        )
    if scheme != "https" and not endpoint.ca and os.environ.get("DOCKER_TLS_VERIFY", "") in ("", "0"):
        return f"http://{rest}", aiohttp.TCPConnector(limit=0)
    directory = Path(os.environ.get("DOCKER_CERT_PATH") or config_directory())
    ca = Path(endpoint.ca or directory / "ca.pem")
    try:
        context = ssl.create_default_context(cafile=str(ca))
        context.load_cert_chain(endpoint.certificate or directory / "cert.pem", endpoint.key or directory / "key.pem")
    except OSError as error:
        raise DaemonError(
            f"the certificates for {address} in {ca.parent} cannot be used ({error}); set DOCKER_CERT_PATH"
        ) from error
    return f"https://{rest}", aiohttp.TCPConnector(limit=0, ssl=context)
