"""Connects containers to the proxy: a mounted socket, and sandboxes/network/forwarder.py as the main process.

Where the daemon sees the proxy's socket, its directory is bind-mounted. Elsewhere one relay container per run, on the
daemon's bridge, offers a socket in a volume and passes connections on to the proxy's address. No firewall is changed,
and no sandbox has a network of its own. Left out: encryption between relay and proxy, so their network must be yours.
"""

import asyncio
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sandboxes.base import SandboxError, Spec
from sandboxes.docker.daemon import DockerDaemon, start_container
from sandboxes.docker.isolation.walls import with_walls
from sandboxes.docker.labels import labels_of, this_process
from sandboxes.docker.wiring import Supplier, Supply
from sandboxes.network import forwarder
from sandboxes.output import BoundedOutput

READY_SECONDS = 120.0
HOST = "host.docker.internal"
"""Name of the daemon's host inside a relay container."""
RELAY_MEMORY = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A Python that runs inside containers."""

    python: str
    image: str
    """Image of the relay container."""
    mounts: Supplier | None = None
    """Mounts the interpreter where images have none."""


@dataclass
class Channel:
    """Connects each container to the proxy: through a relay if there is an `address`, else by the `socket`."""

    daemon: DockerDaemon
    runtime: Runtime
    socket: Path | None = None
    """The proxy's socket, in a directory that the daemon sees under the same path."""
    address: str = ""
    """HOST:PORT of the proxy's listener for sandboxes, as the daemon's containers reach it."""
    run: str = ""
    _relay: "asyncio.Task[_Relay] | None" = field(default=None, init=False)
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while somebody looks at the relay, so that two sandboxes do not both replace it."""

    async def supply(self, sandbox: str, spec: Spec) -> Supply:
        if spec.network == "none":
            return Supply()
        target = f"unix:{forwarder.DIRECTORY}/{forwarder.SOCKET}"
        if not self.address and self.socket is not None:
            mount: Mapping[str, Any] = {"Type": "bind", "Source": str(self.socket.parent)}
            mount = {**mount, "Target": forwarder.DIRECTORY, "ReadOnly": True}
            target = f"unix:{forwarder.DIRECTORY}/{self.socket.name}"
        else:
            mount = _mount((await self._relayed()).volume, read_only=True)
        main = forwarder.forwarder(self.runtime.python, target=target)
        return Supply(main=main, mounts=[mount], model_url=forwarder.URL, ready=self._ready)

    async def _ready(self, container: str, since: float) -> None:
        await _forwards(self.daemon, container, since)

    async def release(self, sandbox: str) -> None:
        """Do nothing: the relay stays for the other sandboxes."""

    async def close(self) -> None:
        """Remove the relay. Called when no sandbox needs it any more."""
        if self._relay is None:
            return
        await asyncio.wait({self._relay})
        if not self._relay.cancelled() and self._relay.exception() is None:
            await self._relay.result().remove()

    async def _relayed(self) -> "_Relay":
        """Return the run's relay, which the first sandbox starts. If that fails, the next sandbox tries again."""
        async with self._looking:
            if self._relay is None or not await self._works(self._relay):
                self._relay = asyncio.create_task(self._make())
            return await asyncio.shield(self._relay)

    async def _works(self, making: "asyncio.Task[_Relay]") -> bool:
        """Whether the relay runs, or is being made. A daemon that is started again has ended it; then it is removed."""
        if not making.done():
            return True
        if making.cancelled() or making.exception():
            return False
        relay = making.result()
        with suppress(SandboxError), self.daemon.translating_errors(f"looking at {relay.container}"):
            if (await self.daemon.container(relay.container).show())["State"]["Running"]:
                return True
        await relay.remove()
        return False

    async def _make(self) -> "_Relay":
        if not self.address:
            raise SandboxError("the proxy has no listener for sandboxes; start it with --sandbox-socket PATH")
        labels = labels_of("relay", this_process(), self.run)
        name = f"blackforge-relay-{secrets.token_hex(4)}"
        relay = _Relay(self.daemon, name, name)
        supply = Supply() if self.runtime.mounts is None else await self.runtime.mounts.supply(name, Spec())
        with self.daemon.translating_errors("starting the relay to the proxy"):
            try:
                await self.daemon.docker.volumes.create({"Name": relay.volume, "Labels": labels})
                config = with_walls(self._config(relay, supply), self.daemon.seccomp, "strict") | {"Labels": labels}
                container = await self.daemon.docker.containers.create(config, name=relay.container)
                await start_container(container)
                await _forwards(self.daemon, relay.container)
            except BaseException:  # also when cancelled: half a relay must not stay
                await asyncio.shield(relay.remove())
                raise
        return relay

    def _config(self, relay: "_Relay", supply: Supply) -> dict[str, Any]:
        listen = f"unix:{forwarder.DIRECTORY}/{forwarder.SOCKET}"
        main = [*forwarder.forwarder(self.runtime.python, listen, f"tcp:{self.address}"), "check"]
        return {
            "Image": self.runtime.image,
            "Entrypoint": main[:1],
            "Cmd": main[1:],
            "User": "0:0",  # owns the volume, and can do nothing else
            "WorkingDir": "/",
            "HostConfig": {
                "NetworkMode": "bridge",
                "ExtraHosts": [f"{HOST}:host-gateway"],
                "Mounts": [_mount(relay.volume, read_only=False), *supply.mounts],
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "ReadonlyRootfs": True,
                "Memory": RELAY_MEMORY,
                "MemorySwap": RELAY_MEMORY,
                "PidsLimit": 16,
                "Init": True,
            },
        }


@dataclass(frozen=True)
class _Relay:
    daemon: DockerDaemon
    container: str
    volume: str

    async def remove(self) -> None:
        """Remove container and volume. Accept that they are gone already, or never existed."""
        docker = self.daemon.docker
        removals = (docker.containers.container(self.container).delete, {"force": True, "v": True})
        for remove, how in (removals, (self._remove_volume, {})):
            try:
                with self.daemon.translating_errors(f"removing {self.container}"):
                    await remove(**how)
            except SandboxError as error:
                if "no such" not in str(error).lower():
                    raise

    async def _remove_volume(self) -> None:
        await (await self.daemon.docker.volumes.get(self.volume)).delete()


def _mount(volume: str, read_only: bool) -> Mapping[str, Any]:
    options = {"NoCopy": True}
    kind: dict[str, Any] = {"Type": "volume", "Source": volume, "Target": forwarder.DIRECTORY}
    return kind | {"ReadOnly": read_only, "VolumeOptions": options}


async def _forwards(daemon: DockerDaemon, container: str, since: float = 0) -> None:
    """Wait until the forwarder prints `ready`, after `since`. SandboxError, with its output, when it does not."""
    output = BoundedOutput(2000)
    with daemon.translating_errors(f"the forwarder of {container}"):
        try:
            async with asyncio.timeout(READY_SECONDS):
                log = daemon.container(container).log(stdout=True, stderr=True, follow=True, since=f"{since:.6f}")
                async for line in log:
                    if line.strip() == "ready":
                        return
                    output.add(line.encode())
        except TimeoutError:
            output.add(f"nothing in {READY_SECONDS:.0f} s".encode())
    raise SandboxError(f"the forwarder of {container} does not start ({output.text().strip()[-300:]})")


def address_for(daemon: DockerDaemon, listening: str) -> str:
    """Return HOST:PORT under which containers of the daemon reach a listening address of this machine.

    For an address of every interface (0.0.0.0, [::]) that is the daemon's host as containers see it; for a daemon on
    another machine, our address on the route to it.
    """
    parts = urlsplit(listening)
    if parts.hostname not in ("0.0.0.0", "::"):
        return parts.netloc
    away = urlsplit(daemon.address)
    if away.scheme == "unix":
        return f"{HOST}:{parts.port}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((away.hostname, away.port or 2375))  # sends nothing
        return f"{probe.getsockname()[0]}:{parts.port}"
