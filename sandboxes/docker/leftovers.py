"""What is ours on a Docker daemon, whose it is, and its removal once the owner is dead.

Only what carries our labels is looked at. What an owner on another host, or in another process namespace, has made
cannot be judged from here and is left alone. Left out: images, which are a cache that is cheap to keep.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiodocker
from aiodocker.networks import DockerNetwork
from aiodocker.volumes import DockerVolume

from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.labels import KIND, RUN, SHARED, OwnerProcess, read_owner

OUR_LABEL = json.dumps({"label": [KIND]})
NOBODY = OwnerProcess("", "", 0, 0)
GONE = (404, 409)
"""Removed by somebody else meanwhile, or just being removed, or in use again."""


@dataclass(frozen=True, kw_only=True)
class DockerResource:
    """A container, network or volume that carries our labels."""

    daemon: str
    kind: Literal["container", "network", "volume"]
    name: str
    purpose: str
    run: str
    owner: OwnerProcess
    alive: bool | None
    """Whether its owner lives; None: cannot be told from here."""

    @property
    def shared(self) -> bool:
        """Made for every run to come, whoever made it."""
        return self.kind == "volume" and self.purpose in SHARED


async def list_resources(daemon: DockerDaemon) -> list[DockerResource]:
    """Everything of ours, in the order in which it can be removed: containers, networks, volumes."""
    with daemon.translating_errors("listing what is there"):
        containers = await daemon.docker.containers.list(all=True, filters=OUR_LABEL)
        networks = await daemon.docker.networks.list(filters=json.loads(OUR_LABEL))
        volumes = (await daemon.docker.volumes.list(filters=json.loads(OUR_LABEL)))["Volumes"] or []
    found = [_thing(daemon, "container", one["Names"][0].lstrip("/"), one["Labels"]) for one in containers]
    found += [_thing(daemon, "network", one["Name"], one["Labels"]) for one in networks]
    found += [_thing(daemon, "volume", one["Name"], one["Labels"]) for one in volumes]
    return [thing for thing in found if thing is not None]


def select_orphans(
    found: Sequence[DockerResource], dead_hosts: Collection[str] = (), bundles: bool = False
) -> list[DockerResource]:
    """Those that nobody will use again. `dead_hosts`: hosts whose owners count as dead where they cannot be judged."""
    dead = [one for one in found if one.alive is False or (one.alive is None and one.owner.host in dead_hosts)]
    return [one for one in found if (bundles if one.shared else one in dead)]


async def remove_resources(daemon: DockerDaemon, orphaned: Sequence[DockerResource]) -> list[DockerResource]:
    """Remove them and say which are gone by us. A volume or network that is in use again stays."""
    return [thing for thing in orphaned if await _removed(daemon, thing)]


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
