"""Where containers with a network of their own may go: to the Internet, and no nearer than a task says.

A container of ours joins the sandbox's network name space, takes the routes away (sandboxes/network/routes.py) and
ends. The sandbox itself may not change routes. Builds run in the name space of such a container, which stays meanwhile.
"""

import ipaddress
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.base import SandboxError, Spec
from sandboxes.docker.daemon import DockerDaemon, start_container
from sandboxes.docker.isolation.walls import with_walls
from sandboxes.docker.labels import labels_of, this_process
from sandboxes.docker.wiring import Supplier, Supply
from sandboxes.network import routes

MEMORY = 128 << 20
STAY = "import signal; signal.pause()"


@dataclass(frozen=True, kw_only=True)
class Router:
    """Restricts the networks of one daemon's containers."""

    daemon: DockerDaemon
    python: str
    """A Python that runs inside containers of `image`."""
    image: str
    mounts: Supplier | None = None
    """Mounts the interpreter where the image has none."""
    run: str = ""

    async def restrict(self, container: str, reach: Sequence[str] = ()) -> None:
        """Leave a running container the Internet and the networks of `reach`. SandboxError when that fails."""
        name = f"{container}-routes"
        config = await self._config(name, f"container:{container}", reach)
        with self.daemon.translating_errors(f"restricting the network of {container}"):
            helper = await self.daemon.docker.containers.create(config, name=name)
            try:
                await start_container(helper)
                code = (await helper.wait())["StatusCode"]
                text = "".join(await helper.log(stdout=True, stderr=True)).strip()
            finally:
                await helper.delete(force=True, v=True)
        if code or text != "restricted":
            raise SandboxError(f"the network of {container} cannot be restricted ({text[-300:]})")

    @asynccontextmanager
    async def network(self) -> AsyncIterator[str]:
        """Give the network mode for a build: the name space of a container that nothing runs in."""
        if not await self._has_bridge():
            yield "none"
            return
        name = f"blackforge-build-{this_process().pid}-{secrets.token_hex(4)}"
        config = await self._config(name, "bridge", (), STAY)
        with self.daemon.translating_errors("making the network of a build"):
            holder = await self.daemon.docker.containers.create(config, name=name)
            try:
                await start_container(holder)
                await self.restrict(name)
                yield f"container:{name}"
            finally:
                await holder.delete(force=True, v=True)

    async def _has_bridge(self) -> bool:
        with self.daemon.translating_errors("listing networks"):
            return any(network["Name"] == "bridge" for network in await self.daemon.docker.networks.list())

    async def _config(self, name: str, network: str, reach: Sequence[str], program: str = "") -> dict[str, Any]:
        supply = Supply() if self.mounts is None else await self.mounts.supply(name, Spec())
        forbidden = ",".join([*routes.FORBIDDEN, *(own_addresses() if self.daemon.local else ())])
        source = program or Path(routes.__file__).read_text()
        config = {
            "Image": self.image,
            "Entrypoint": [self.python, "-I", "-S", "-c", source, forbidden, ",".join(reach)],
            "Cmd": [],
            "User": "0:0",
            "WorkingDir": "/",
            "Labels": labels_of("routes", this_process(), self.run),
            "HostConfig": {
                "NetworkMode": network,
                "Mounts": list(supply.mounts),
                "CapDrop": ["ALL"],
                "CapAdd": [] if program else ["NET_ADMIN"],
                "SecurityOpt": ["no-new-privileges"],
                "ReadonlyRootfs": True,
                "Memory": MEMORY,
                "MemorySwap": MEMORY,
                "PidsLimit": 16,
            },
        }
        return with_walls(config, self.daemon.seccomp, "strict")


def own_addresses(tables: Path = Path("/proc/net")) -> list[str]:
    """Return this machine's addresses, its loopback left out. SandboxError when they cannot be read."""
    texts = set()
    try:
        lines = (tables / "fib_trie").read_text().splitlines()
        for above, line in zip(lines, lines[1:], strict=False):
            if "/32 host LOCAL" in line:
                texts.add(above.split()[-1])
        with suppress(FileNotFoundError):  # a kernel without IPv6
            for line in (tables / "if_inet6").read_text().splitlines():
                texts.add(str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))))
    except OSError as error:
        raise SandboxError(
            f"this machine's addresses cannot be read ({error}), so a container with a full network or a build would "
            f"reach them; run where {tables} can be read, or leave out tasks with a full network or a Dockerfile"
        ) from error
    addresses = [ipaddress.ip_address(text) for text in sorted(texts)]
    return [str(address) for address in addresses if not address.is_loopback and not address.is_link_local]
