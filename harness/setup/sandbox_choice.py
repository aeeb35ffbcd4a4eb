"""Which kind of sandbox a run has: Docker where an engine answers, else bubblewrap where it works, else processes.

The choice is made before anything starts, said in the run's first lines, and kept: a run is resumed with the same kind.
Several engines are harness/setup/placement.py's matter.
"""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from harness.agents.install import agents_directory
from harness.settings import IMAGE, Settings
from harness.setup.stack import RunningProxy
from harness.tasks import Task
from proxy.pool.errors import UserError
from sandboxes.base import SandboxError, Sandboxes
from sandboxes.bundles import PYTHON, RUNTIME_NAME, read_manifest
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.bundles import Bundles, Way, empty_image
from sandboxes.docker.daemon import DaemonError, DockerDaemon
from sandboxes.docker.network import Channel, Runtime, address_for
from sandboxes.fleet import HostOptions, Hosts, parse_host
from sandboxes.gc import usual_daemons
from sandboxes.local import bubblewrap
from sandboxes.local.bubblewrap import BubblewrapSandboxes
from sandboxes.local.process import ProcessSandboxes, default_root, make_sandbox_directory
from sandboxes.network.forwarder import SOCKET

Kind = Literal["docker", "bubblewrap", "process"]


@dataclass(frozen=True)
class SandboxChoice:
    """A kind of sandbox, and what it is worth."""

    kind: Kind
    promise: str
    passed_over: str = ""
    """Why no better kind was taken."""

    def __str__(self) -> str:
        why = f" ({self.passed_over})" if self.passed_over else ""
        return f"sandboxes: {self.kind}, {self.promise}{why}"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What is needed to start sandboxes, here or on another node."""

    kind: Kind
    url: str = ""
    """The proxy's, for sandboxes that are separated only. Without any of the three no sandbox reaches a model."""
    socket: Path | None = None
    """The proxy's listener for sandboxes on this machine."""
    address: str = ""
    """The one for relays, as the proxy names it."""
    relay: bool = False
    """Reach the proxy through a relay, also where the socket would do."""
    bundles: Way = "volume"
    """How agents get into containers."""
    image: str = IMAGE
    shown: tuple[Path, ...] = ()
    run: str = ""

    async def open(self, engine: str = "") -> Sandboxes:
        """The back end; SandboxError when it cannot be had. Docker's at this address, or at DOCKER_HOST."""
        if self.kind == "process":
            return ProcessSandboxes(model_url=self.url, bundles=agents_directory())
        if self.kind == "bubblewrap":
            return BubblewrapSandboxes(model_socket=self.socket, bundles=agents_directory(), shown=self.shown)
        return await _docker(self, engine)


@contextmanager
def listening(choice: SandboxChoice, settings: Settings) -> Iterator[dict[str, str]]:
    """The listeners for sandboxes that a proxy of our own is to have, by their keys in its configuration."""
    if choice.kind == "process":
        yield {}
        return
    try:
        directory = make_sandbox_directory(default_root())  # found by gc
    except SandboxError as error:
        raise UserError(str(error)) from error
    engines = [parse_host(text).address for text in settings.docker] or usual_daemons()
    remote = choice.kind == "docker" and not all(engine.startswith("unix://") for engine in engines)
    try:
        yield {"sandbox_socket": str(directory / SOCKET)} | (
            {"sandbox_address": "0.0.0.0:0"} if settings.relay or remote else {}
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def backend_for(choice: SandboxChoice, settings: Settings, proxy: RunningProxy, run: str) -> Backend:
    """What the choice needs of this proxy; UserError when the proxy does not have it."""
    socket, address = Path(proxy.sandboxes.get("socket", "")), proxy.sandboxes.get("address", "")
    found = socket if socket.is_socket() else None
    if choice.kind == "bubblewrap" and found is None or choice.kind == "docker" and not (found or address):
        raise UserError(
            f"the proxy {proxy.url} has no listener that {choice.kind} sandboxes reach from here; start it with "
            "--sandbox-socket PATH (on another machine --sandbox-address HOST:PORT), or give --sandbox process"
        )
    return Backend(
        kind=choice.kind,
        url=proxy.url,
        socket=found,
        address=address,
        relay=settings.relay,
        bundles=settings.bundles,
        image=settings.image,
        shown=tuple(Path(path) for path in settings.show),
        run=run,
    )


class _Docker(DockerSandboxes):
    """With the run's uploads and its relay, which go when the last sandbox has gone."""

    bundles: Bundles
    channel: Channel

    async def close(self) -> None:
        try:
            await self.bundles.close()
            await super().close()
        finally:
            await self.channel.close()
            await self.channel.daemon.close()


async def _docker(backend: Backend, address: str) -> Sandboxes:
    engine, second = await DockerDaemon.open(address), await DockerDaemon.open(address)
    bundles = Bundles(engine, agents_directory(), backend.bundles)
    with second.translating_errors("making an empty image"):
        nothing = await empty_image(second.docker)
    near = engine.address.startswith("unix://") and backend.socket is not None and not backend.relay
    channel = Channel(
        daemon=second,
        runtime=Runtime(python=PYTHON, image=nothing, mounts=bundles),
        socket=backend.socket if near else None,
        address="" if near or not backend.address else address_for(second, backend.address),
        run=backend.run,
    )
    ways = [channel] if near or backend.address else []
    options = Options(address=address, image=backend.image, run=backend.run, suppliers=[*ways, bundles])
    made = _Docker(engine, options)
    made.bundles, made.channel = bundles, channel
    return made


def choose(asked: str, tasks: Sequence[Task], engines: Sequence[str] = ()) -> SandboxChoice:
    """The kind that was asked for, or the best there is; UserError when there is none for these tasks.

    `engines`: Docker's addresses, of which one must answer; none: the usual one.
    """
    reasons: list[str] = []
    for kind in ("docker", "bubblewrap", "process") if asked == "auto" else (asked,):
        try:
            choice = _kind(kind, engines)
        except SandboxError as error:
            reasons.append(str(error))
            continue
        unfit = next((reason for task in tasks if (reason := _unfit(task, choice.kind))), "")
        if unfit:
            cause = f"; {reasons[0]}" if reasons else ""
            raise UserError(f"{unfit}, which {choice.kind} sandboxes do not have; use Docker (--sandbox docker){cause}")
        return replace(choice, passed_over="; ".join(filter(None, (*reasons, choice.passed_over))))
    raise UserError(f"there are no {asked} sandboxes here ({reasons[0]}); choose another with --sandbox, or auto")


def _kind(kind: str, engines: Sequence[str]) -> SandboxChoice:
    """SandboxError when there is none of this kind here."""
    if kind == "docker":
        return asyncio.run(_docker_choice(engines or [""]))
    if kind == "bubblewrap":
        if why_not := bubblewrap.why_not():
            raise SandboxError(f"bubblewrap does not work: {why_not}")
        return SandboxChoice("bubblewrap", BubblewrapSandboxes.promise)
    return SandboxChoice("process", ProcessSandboxes.promise)


async def _docker_choice(engines: Sequence[str]) -> SandboxChoice:
    """What the sandboxes of the first engine that answers are worth; EngineError when none does."""
    if read_manifest(agents_directory() / RUNTIME_NAME) is None:
        raise DaemonError("agents' runtime for containers is not installed; run: harness agents install runtime")
    hosts = Hosts([HostOptions(address=address) for address in engines], _plain)
    try:
        out = await hosts.check()
        return SandboxChoice("docker", hosts.promise, "; ".join(out))
    finally:
        await hosts.close()


async def _plain(address: str) -> Sandboxes:
    return await DockerSandboxes.open(Options(address=address))


def _unfit(task: Task, kind: Kind) -> str:
    """What a task wants that only Docker has."""
    if kind == "docker":
        return ""
    if task.image is not None:
        return f"the task {task.id} wants the image {task.image.name or task.image.directory}"
    if task.profile != "strict" or task.daemons:
        return f"the task {task.id} wants {'the profile harbor' if task.profile != 'strict' else 'daemons'}"
    if kind == "process" and task.network == "none":
        return f"the task {task.id} wants no network"
    return ""
