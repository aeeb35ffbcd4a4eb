"""Chooses a run's kind of sandbox: Docker if a daemon answers, else bubblewrap if it works, else plain processes.

The choice is made before anything starts and printed in the run's first lines. A resumed run keeps it. Several Docker
daemons are handled in harness/setup/placement.py.
"""

import asyncio
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from harness.agents.bundles.install import agents_directory
from harness.settings import IMAGE, Settings
from harness.setup.stack import RunningProxy
from harness.tasks import Task
from harness.tasks.schema import Step
from harness.verdict.verifier import LOGS
from proxy.pool.errors import UserError
from sandboxes.base import Profile, SandboxError, Sandboxes
from sandboxes.bundles import PYTHON, RUNTIME_NAME, read_manifest
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.bundles import Bundles, Way, empty_image
from sandboxes.docker.daemon import DaemonError, DockerDaemon
from sandboxes.docker.isolation.reach import Router
from sandboxes.docker.isolation.walls import NATIVE
from sandboxes.docker.network import Channel, Runtime, address_for
from sandboxes.fleet import HostOptions, Hosts, parse_host
from sandboxes.gc import usual_daemons
from sandboxes.local import bubblewrap, memory_group
from sandboxes.local.bubblewrap import MOUNTED, BubblewrapSandboxes
from sandboxes.local.process import ProcessSandboxes, default_root, make_sandbox_directory
from sandboxes.network.forwarder import SOCKET

Kind = Literal["docker", "bubblewrap", "process"]
NO_RUNTIMES: Mapping[Profile, str] = {}


@dataclass(frozen=True)
class SandboxChoice:
    """A kind of sandbox, and what it protects against."""

    kind: Kind
    promise: str
    passed_over: str = ""
    """Why no better kind was chosen."""

    def __str__(self) -> str:
        why = f" ({self.passed_over})" if self.passed_over else ""
        return f"sandboxes: {self.kind}, {self.promise}{why}"


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Everything needed to start sandboxes, in this process or on another node."""

    kind: Kind
    url: str = ""
    """URL of the proxy, for process sandboxes. Without `url`, `socket` and `address` no sandbox reaches a model."""
    socket: Path | None = None
    """Unix socket of the proxy for sandboxes on this machine."""
    address: str = ""
    """HOST:PORT of the proxy for relay containers."""
    relay: bool = False
    """Reach the proxy through a relay even where the socket would do."""
    bundles: Way = "volume"
    """How agents get into containers."""
    image: str = IMAGE
    shown: tuple[Path, ...] = ()
    runtimes: Mapping[Profile, str] = field(default_factory=dict, hash=False)  # nodes keep what they open by its hash
    """Profile -> runtime of its containers."""
    run: str = ""

    async def open(self, daemon: str = "") -> Sandboxes:
        """Open the back end. SandboxError when it cannot be used. `daemon`: address of a Docker daemon."""
        if self.kind == "process":
            return ProcessSandboxes(model_url=self.url, bundles=agents_directory())
        if self.kind == "bubblewrap":
            return BubblewrapSandboxes(model_socket=self.socket, bundles=agents_directory(), shown=self.shown)
        return await _docker(self, daemon)


@contextmanager
def listening(choice: SandboxChoice, settings: Settings) -> Iterator[dict[str, str]]:
    """Give the listeners for sandboxes that a started proxy needs, as keys of its configuration."""
    if choice.kind == "process":
        yield {}
        return
    try:
        directory = make_sandbox_directory(default_root())  # a name that gc recognises after kill -9
    except SandboxError as error:
        raise UserError(str(error)) from error
    daemons = [parse_host(text).address for text in settings.docker] or usual_daemons()
    remote = choice.kind == "docker" and not all(daemon.startswith("unix://") for daemon in daemons)
    try:
        yield {"sandbox_socket": str(directory / SOCKET)} | (
            {"sandbox_address": "0.0.0.0:0"} if settings.relay or remote else {}
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def backend_for(choice: SandboxChoice, settings: Settings, proxy: RunningProxy, run: str) -> Backend:
    """Combine a choice with a proxy. UserError when the proxy has no listener that such sandboxes can reach."""
    socket, address = Path(proxy.sandboxes.get("socket", "")), proxy.sandboxes.get("address", "")
    existing = socket if socket.is_socket() else None
    if choice.kind == "bubblewrap" and existing is None or choice.kind == "docker" and not (existing or address):
        raise UserError(
            f"the proxy {proxy.url} has no listener that {choice.kind} sandboxes reach from here; start it with "
            "--sandbox-socket PATH (on another machine --sandbox-address HOST:PORT), or give --sandbox process"
        )
    return Backend(
        kind=choice.kind,
        url=proxy.url,
        socket=existing,
        address=address,
        relay=settings.relay,
        bundles=settings.bundles,
        image=settings.image,
        shown=tuple(Path(path) for path in settings.show),
        runtimes=runtimes_of(settings.runtime),
        run=run,
    )


class _Docker(DockerSandboxes):
    """Docker sandboxes that also close the run's uploads and its relay."""

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
    daemon, second = await DockerDaemon.open(address), await DockerDaemon.open(address)
    bundles = Bundles(daemon, agents_directory(), backend.bundles)
    with second.translating_errors("making an empty image"):
        nothing = await empty_image(second.docker)
    near = daemon.address.startswith("unix://") and backend.socket is not None and not backend.relay
    channel = Channel(
        daemon=second,
        runtime=Runtime(python=PYTHON, image=nothing, mounts=bundles),
        socket=backend.socket if near else None,
        address="" if near or not backend.address else address_for(second, backend.address),
        run=backend.run,
    )
    ways = [channel] if near or backend.address else []
    router = Router(daemon=second, python=PYTHON, image=nothing, mounts=bundles, run=backend.run)
    options = Options(
        address=address,
        image=backend.image,
        run=backend.run,
        suppliers=[*ways, bundles],
        router=router,
        runtimes=backend.runtimes,
    )
    sandboxes = _Docker(daemon, options)
    sandboxes.bundles, sandboxes.channel = bundles, channel
    return sandboxes


def runtimes_of(given: Sequence[str]) -> dict[Profile, str]:
    """Read PROFILE=NAME. UserError for anything else."""
    runtimes: dict[Profile, str] = {}
    for text in given:
        profile, _, name = text.partition("=")
        if profile not in ("strict", "harbor") or not name:
            raise UserError(f"a runtime is strict=NAME or harbor=NAME, not: {text}; correct --runtime")
        runtimes["strict" if profile == "strict" else "harbor"] = name
    return runtimes


def choose(
    asked: str, tasks: Sequence[Task], daemons: Sequence[str] = (), runtimes: Mapping[Profile, str] = NO_RUNTIMES
) -> SandboxChoice:
    """Choose the kind that was asked for, or with `auto` the best that works. UserError when no kind fits the tasks.

    `daemons`: addresses of Docker daemons, of which one must answer. Empty: the usual one.
    """
    reasons: list[str] = []
    _check_runtimes(tasks, runtimes)
    for kind in ("docker", "bubblewrap", "process") if asked == "auto" else (asked,):
        try:
            choice = _kind(kind, daemons, runtimes)
        except SandboxError as error:
            reasons.append(str(error))
            continue
        if runtimes and choice.kind != "docker":
            raise UserError(f"--runtime is for Docker, and this run has {choice.kind} sandboxes; leave it out")
        unfit = next((reason for task in tasks if (reason := _unfit(task, choice.kind))), "")
        if unfit:
            cause = f"; {reasons[0]}" if reasons else ""
            raise UserError(f"{unfit}, which {choice.kind} sandboxes do not have; use Docker (--sandbox docker){cause}")
        return replace(choice, passed_over="; ".join(filter(None, (*reasons, choice.passed_over))))
    raise UserError(f"{asked} sandboxes do not work here ({reasons[0]}); choose another kind with --sandbox, or auto")


def _check_runtimes(tasks: Sequence[Task], runtimes: Mapping[Profile, str]) -> None:
    """UserError for a task whose sandbox cannot share its network, which other containers must join."""
    for task in tasks:
        runtime = runtimes.get(task.profile, "")
        verifiers = (task.verifier, *(step.verifier for step in task.steps))
        full = "full" in (task.network, *(verifier.network for verifier in verifiers))
        if runtime and runtime not in NATIVE and (full or task.services):
            wants = "services" if task.services else "a full network"
            raise UserError(
                f"the task {task.id} wants {wants}, which containers of runtime {runtime} cannot share with others; "
                f"leave out --runtime {task.profile}={runtime} for it"
            )


def _kind(kind: str, daemons: Sequence[str], runtimes: Mapping[Profile, str]) -> SandboxChoice:
    """Check that this kind works. SandboxError when it does not."""
    if kind == "docker":
        return asyncio.run(_docker_choice(daemons or [""], runtimes))
    if kind == "bubblewrap":
        if why_not := bubblewrap.why_not():
            raise SandboxError(f"bubblewrap does not work: {why_not}")
        return SandboxChoice("bubblewrap", _promise(BubblewrapSandboxes.promise))
    return SandboxChoice("process", _promise(ProcessSandboxes.promise))


def _promise(promise: str) -> str:
    return "; ".join(filter(None, (promise, memory_group.why_not())))


async def _docker_choice(daemons: Sequence[str], runtimes: Mapping[Profile, str]) -> SandboxChoice:
    """Choose Docker if one daemon answers. DaemonError when none does."""
    if read_manifest(agents_directory() / RUNTIME_NAME) is None:
        raise DaemonError("agents' runtime for containers is not installed; run: harness agents install runtime")

    async def plain(address: str) -> Sandboxes:
        return await DockerSandboxes.open(Options(address=address, runtimes=runtimes))

    hosts = Hosts([HostOptions(address=address) for address in daemons], plain)
    try:
        out = await hosts.check()
        return SandboxChoice("docker", hosts.promise, "; ".join(out))
    finally:
        await hosts.close()


def _unfit(task: Task, kind: Kind) -> str:
    """Say what a task needs that only Docker offers; empty when it needs nothing."""
    if kind == "docker":
        return ""
    parts: tuple[Task | Step, ...] = (task, *task.steps)
    owns = [part.verifier.environment for part in parts]
    for image in (task.image, *(own.image for own in owns if own)):
        if image is not None:
            return f"the task {task.id} wants the image {image.name or image.directory}"
    if task.profile != "strict" or task.daemons:
        return f"the task {task.id} wants {'the profile harbor' if task.profile != 'strict' else 'daemons'}"
    if task.services:
        return f"the task {task.id} wants services"
    if kind == "process" and task.network == "none":
        return f"the task {task.id} wants no network"
    places = MOUNTED if kind == "bubblewrap" else {}
    for path in _absolute_paths(task):
        if not any(Path(path).is_relative_to(place) and Path(path) != Path(place) for place in places):
            return f"the task {task.id} wants {path} for files of its own"
    return ""


def _absolute_paths(task: Task) -> Iterator[str]:
    """The places outside of the sandbox's own directories that a task empties or writes to."""
    parts: tuple[Task | Step, ...] = (task, *task.steps)
    for part in parts:
        solution = part.solution.directories if part.solution else {}
        yield from (path for path in (*part.directories, *part.verifier.directories, *solution) if path.startswith("/"))
        if part.verifier.rewards == "logs":
            yield LOGS
