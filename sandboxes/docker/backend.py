"""Docker sandboxes: starts a container from a spec, labels it, and removes it with all that it wrote."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from sandboxes.base import Profile, Sandbox, SandboxError, Spec
from sandboxes.docker.container.freezing import holder_config, holder_of, pause
from sandboxes.docker.container.sandbox import DockerSandbox, StartedContainer
from sandboxes.docker.daemon import ContainerCommand, DaemonError, DockerDaemon, start_container
from sandboxes.docker.image.images import STASH, Images, log
from sandboxes.docker.isolation.reach import Router
from sandboxes.docker.isolation.walls import missing_runtime, with_walls
from sandboxes.docker.labels import IMAGE, RELAXED, labels_of, sandbox_labels, this_process
from sandboxes.docker.profiles import ACCOUNTS, BaseImage, container_config, writable_places
from sandboxes.docker.services import names_of, start_services
from sandboxes.docker.wiring import Supplier, Supply, merge_supplies
from sandboxes.output import BoundedOutput

AT_ONCE = 16
"""Containers being started or removed at the same time. A daemon is no faster with more."""
SEED_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that all sandboxes of a back end share."""

    address: str = ""
    """unix:///path, tcp://host:port; empty: DOCKER_HOST, the context in use, or the local socket."""
    image: str = ""
    """Image for specs that name none."""
    run: str = ""
    """Name of the run, a label on everything that is created."""
    suppliers: Sequence[Supplier] = ()
    runtimes: Mapping[Profile, str] = field(default_factory=dict)
    """Profile -> runtime of its containers. Others have the daemon's default."""
    router: Router | None = None
    """Keeps full networks and builds from what is private or near. None: they reach whatever the host reaches."""
    progress: Callable[[str], None] = log.info
    """Called with a line for each pull and each step of a build. `making` says what goes on now."""


class DockerSandboxes:
    """Starts containers on one daemon. `open` creates one."""

    kind = "docker"

    def __init__(self, daemon: DockerDaemon, options: Options):
        self.daemon, self._options = daemon, options
        self.images = Images(daemon, options.image, options.progress, options.router)
        self._owner = this_process()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._running: dict[str, DockerSandbox] = {}
        self._undoing: set[asyncio.Task[None]] = set()
        self._stranded: set[str] = set()
        """Sandboxes that could not be removed, because the daemon was away."""
        self._services: dict[str, list[str]] = {}
        """Sandbox id -> containers of its services."""

    @classmethod
    async def open(cls, options: Options | None = None) -> "DockerSandboxes":
        """Connect to the daemon. DaemonError when it cannot be used."""
        options = options or Options()
        daemon = await DockerDaemon.open(options.address)
        if missing := missing_runtime(daemon, options.runtimes.values()):
            await daemon.close()
            raise DaemonError(missing)
        return cls(daemon, options)

    @property
    def away(self) -> str:
        return self.daemon.presence.away

    @property
    def away_seconds(self) -> float:
        return self.daemon.presence.away_seconds

    @property
    def making(self) -> str:
        return str(self.images.work)

    async def was_away(self, since: float, sandbox: Sandbox | None = None) -> bool:
        return await self.daemon.presence.was_away(since)

    async def until_there(self) -> None:
        await self.daemon.presence.until_there()

    @property
    def promise(self) -> str:
        host_root = "the host's root, held by its capabilities (userns-remap of the daemon would make it nobody)"
        root = "an unprivileged user outside" if self.daemon.remapped else host_root
        return (
            "containers with limits and a network of their own; strict: unprivileged, no capabilities, read-only root; "
            f"harbor: root inside, which is {root}, and a disk without limit; they share the host's kernel"
        )

    async def start(self, spec: Spec) -> DockerSandbox:
        self.daemon.presence.watch()
        await self._remove_stranded()
        try:
            return await self._begin(spec)
        except SandboxError as error:
            if not self.images.forget(error):
                raise
            return await self._begin(spec)

    async def _begin(self, spec: Spec) -> DockerSandbox:
        base = await self.images.base(spec)
        starting = asyncio.create_task(self._start(spec, base))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # the daemon may be halfway: let it finish, to know what to remove
            undoing = asyncio.create_task(_undone(starting))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            await asyncio.shield(undoing)
            raise

    async def _start(self, spec: Spec, base: BaseImage) -> DockerSandbox:
        sandbox = f"{self._owner.pid}-{self._owner.started}-{secrets.token_hex(4)}"
        try:
            supplies = [await supplier.supply(sandbox, spec) for supplier in self._options.suppliers]
            async with self._slots:
                running = await self._make(sandbox, spec, base, merge_supplies(supplies))
            if spec.services:
                self._services[sandbox] = names_of(running.container, spec)
                await start_services(self.daemon, self.images, running.container, spec, self._labels(sandbox, spec))
            return running
        except BaseException:  # also when cancelled: half a sandbox must not stay
            await self._remove(sandbox)
            raise

    async def _make(self, sandbox: str, spec: Spec, base: BaseImage, supply: Supply) -> DockerSandbox:
        labels = self._labels(sandbox, spec) | {IMAGE: base.name}
        name = container_name(sandbox)
        log.info("sandbox %s of image %s, relaxed: %s", sandbox, base.name, labels[RELAXED] or "nothing")
        config = container_config(spec, base, supply, labels, self.daemon.first_id)
        runtime = self._options.runtimes.get(spec.profile, "")
        config = with_walls(config, self.daemon.seccomp, spec.profile, spec.system_calls, runtime)
        with self.daemon.translating_errors(f"starting a sandbox of image {base.name}"):
            container = await self.daemon.docker.containers.create(config, name=name)
            await start_container(container)
        if spec.network == "full":
            await self._connect(name, spec)
        if base.seeded:
            await self._seed(name, base)
        if supply.ready is not None:
            await supply.ready(name, 0.0)
        started = StartedContainer(
            id=sandbox,
            container=name,
            work=base.work,
            accounts=ACCOUNTS[spec.profile],
            model_url=supply.model_url,
            bundles=supply.bundles,
            disk_mb=spec.disk_mb,
            cpus=spec.cpus or self.daemon.cpus,
            labels=labels,
            writable=spec.profile == "harbor",
            networked=spec.network == "full",
            connect=lambda: self._connect(name, spec),
            places=tuple(writable_places(base)) if spec.profile == "strict" else (),
            holder=holder_config(name, base.id, labels) if spec.profile == "strict" else None,
            services=tuple(service.name for service in spec.services),
            ready=supply.ready,
        )
        self._running[sandbox] = running = DockerSandbox(self.daemon, started, lambda: self._remove(sandbox))
        return running

    async def _connect(self, container: str, spec: Spec) -> None:
        """Give a running container the daemon's bridge. It is paused until it is kept from what is private or near.

        If that fails, it stays paused.
        """
        with self.daemon.translating_errors(f"the network of {container}"):
            target = self.daemon.container(container)
            await pause(target)
            if "none" in (await target.show())["NetworkSettings"]["Networks"]:  # after a restart it is in no network
                await (await self.daemon.docker.networks.get("none")).disconnect({"Container": container})
            await (await self.daemon.docker.networks.get("bridge")).connect({"Container": container})
            if self._options.router is not None:
                await self._options.router.restrict(container, spec.reach)
            await target.unpause()

    def _labels(self, sandbox: str, spec: Spec) -> dict[str, str]:
        return labels_of("sandbox", self._owner, self._options.run) | sandbox_labels(sandbox, spec, "")

    async def _seed(self, container: str, base: BaseImage) -> None:
        """Copy the image's working directory into the writable mount that covers it."""
        output = BoundedOutput(2000)
        copy = ContainerCommand(argv=("cp", "-a", f"{STASH}/.", base.work), user=ACCOUNTS["strict"]["agent"].ids)
        try:
            async with asyncio.timeout(SEED_SECONDS):
                code = await self.daemon.execute(container, copy, output.add)
        except TimeoutError:
            raise SandboxError(
                f"copying {base.work} of image {base.name} took longer than {SEED_SECONDS:g} s; make it smaller"
            ) from None
        if code:
            raise SandboxError(
                f"the content of {base.work} in image {base.name} cannot be copied (exit code {code}: "
                f"{output.text()[-300:].strip()}); give the task more disk or memory"
            )

    async def _remove_stranded(self) -> None:
        """Remove what could not be removed while the daemon was away, so that no agent goes on in it."""
        for sandbox in list(self._stranded):  # each stays noted until it is gone, also if this is cancelled
            with suppress(SandboxError):  # the daemon is away again
                await self._remove(sandbox)
                self._stranded.discard(sandbox)

    async def _remove(self, sandbox: str) -> None:
        """Remove a sandbox with everything in it. Accept that it is gone already."""
        name = container_name(sandbox)
        try:
            for service in self._services.get(sandbox, ()):
                await self._delete(service)
            await self._delete(holder_of(name))
            await self._delete(name)
        except DaemonError:
            self._stranded.add(sandbox)
            raise
        finally:
            for supplier in self._options.suppliers:
                await supplier.release(sandbox)
        self._running.pop(sandbox, None)
        self._services.pop(sandbox, None)

    async def _delete(self, container: str) -> None:
        try:
            async with self._slots:
                with self.daemon.translating_errors(f"removing {container}"):
                    await self.daemon.container(container).delete(force=True, v=True)
        except DaemonError:
            raise
        except SandboxError as error:
            if "No such container" not in str(error) and "is already in progress" not in str(error):
                raise

    async def close(self) -> None:
        """Stop all sandboxes that still run, and disconnect from the daemon."""
        await asyncio.gather(*self._undoing, return_exceptions=True)
        await self._remove_stranded()
        left = [sandbox.stop() for sandbox in self._running.values()]
        ends = await asyncio.gather(*left, return_exceptions=True)
        await self.images.close()
        await self.daemon.close()
        for end in ends:
            if isinstance(end, BaseException):
                raise end


async def _undone(starting: "asyncio.Task[DockerSandbox]") -> None:
    await asyncio.wait({starting})
    if not starting.cancelled() and starting.exception() is None:
        with suppress(SandboxError):  # `close` tries again and reports the error
            await starting.result().stop()


def container_name(sandbox: str) -> str:
    return f"blackforge-{sandbox}"
