"""Lists our resources on a Docker daemon with their owners, and removes those whose owner is dead.

Only resources with our labels are considered. Whether an owner on another host or in another process namespace lives
cannot be checked from here, so its resources stay. Left out: images, which are a cache that is cheap to keep.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiodocker
from aiodocker.networks import DockerNetwork
from aiodocker.volumes import DockerVolume

from sandboxes.base import SandboxError
from sandboxes.docker.daemon import DaemonError, DockerDaemon
from sandboxes.docker.labels import KIND, RUN, SHARED, ResourceOwner, read_owner

OUR_LABEL = json.dumps({"label": [KIND]})
NOBODY = ResourceOwner("", "", 0, 0)
GONE = (404, 409)
"""HTTP statuses: removed by somebody else meanwhile, being removed right now, or in use again."""


@dataclass(frozen=True, kw_only=True)
class DockerResource:
    """A container, network or volume that carries our labels."""

    daemon: str
    kind: Literal["container", "network", "volume"]
    name: str
    purpose: str
    run: str
    owner: ResourceOwner
    alive: bool | None
    """Whether its owner lives; None: cannot be checked from here."""

    @property
    def shared(self) -> bool:
        """Whether later runs use it too, whoever created it."""
        return self.kind == "volume" and self.purpose in SHARED


async def list_resources(daemon: DockerDaemon) -> list[DockerResource]:
    """Return all our resources in the order in which they can be removed: containers, networks, volumes."""
    with daemon.translating_errors("listing resources"):
        containers = await daemon.docker.containers.list(all=True, filters=OUR_LABEL)
        networks = await daemon.docker.networks.list(filters=json.loads(OUR_LABEL))
        volumes = (await daemon.docker.volumes.list(filters=json.loads(OUR_LABEL)))["Volumes"] or []
    resources = [_thing(daemon, "container", one["Names"][0].lstrip("/"), one["Labels"]) for one in containers]
    resources += [_thing(daemon, "network", one["Name"], one["Labels"]) for one in networks]
    resources += [_thing(daemon, "volume", one["Name"], one["Labels"]) for one in volumes]
    return [thing for thing in resources if thing is not None]


def select_orphans(
    resources: Sequence[DockerResource], dead_hosts: Collection[str], bundles: bool
) -> list[DockerResource]:
    """Return those that nobody will use again.

    `dead_hosts`: hosts whose owners count as dead where that cannot be checked. `bundles`: shared volumes as well.
    """
    dead = [one for one in resources if one.alive is False or (one.alive is None and one.owner.host in dead_hosts)]
    return [one for one in resources if (bundles if one.shared else one in dead)]


async def remove_resources(
    daemon: DockerDaemon, orphaned: Sequence[DockerResource], tell: Callable[[str], object]
) -> list[DockerResource]:
    """Remove resources and return those that this call removed. A volume or network that is in use again stays.

    `tell`: called with a sentence for each that cannot be removed. DaemonError when the daemon itself fails.
    """
    removed = []
    for thing in orphaned:
        try:
            if await _removed(daemon, thing):
                removed.append(thing)
        except DaemonError:
            raise
        except SandboxError as error:
            tell(f"{error}; remove it by hand")
    return removed


async def _removed(daemon: DockerDaemon, thing: DockerResource) -> bool:
    with daemon.translating_errors(f"removing the {thing.kind} {thing.name}"):
        try:
            if thing.kind == "container":
                await daemon.container(thing.name).delete(force=True, v=True)
            elif thing.kind == "network":
                await DockerNetwork(daemon.docker, thing.name).delete()
            else:
                await DockerVolume(daemon.docker, thing.name).delete()
        except aiodocker.DockerError as error:
            if error.status not in GONE and "has active endpoints" not in error.message:
                raise
            return False
    return True


def _thing(
    daemon: DockerDaemon, kind: Literal["container", "network", "volume"], name: str, labels: dict[str, Any]
) -> DockerResource | None:
    owner = read_owner(labels) or (NOBODY if kind == "volume" and labels[KIND] in SHARED else None)
    if owner is None:
        return None
    return DockerResource(
        daemon=daemon.address,
        kind=kind,
        name=name,
        purpose=labels[KIND],
        run=labels.get(RUN, ""),
        owner=owner,
        alive=owner.alive(local=daemon.local),
    )
