"""What is ours on a Docker engine, whose it is, and its removal once the owner is dead.

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

from sandboxes.docker.daemon import Engine
from sandboxes.docker.labels import KIND, RUN, SHARED, Owner, owner_of

OURS = json.dumps({"label": [KIND]})
NOBODY = Owner("", "", 0, 0)
GONE = (404, 409)
"""Removed by somebody else meanwhile, or just being removed, or in use again."""


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A container, network or volume that carries our labels."""

    engine: str
    kind: Literal["container", "network", "volume"]
    name: str
    purpose: str
    run: str
    owner: Owner
    alive: bool | None
    """Whether its owner lives; None: cannot be told from here."""

    @property
    def shared(self) -> bool:
        """Made for every run to come, whoever made it."""
        return self.kind == "volume" and self.purpose in SHARED


async def things(engine: Engine) -> list[Thing]:
    """Everything of ours, in the order in which it can be removed: containers, networks, volumes."""
    with engine.telling("listing what is there"):
        containers = await engine.docker.containers.list(all=True, filters=OURS)
        networks = await engine.docker.networks.list(filters=json.loads(OURS))
        volumes = (await engine.docker.volumes.list(filters=json.loads(OURS)))["Volumes"] or []
    found = [_thing(engine, "container", one["Names"][0].lstrip("/"), one["Labels"]) for one in containers]
    found += [_thing(engine, "network", one["Name"], one["Labels"]) for one in networks]
    found += [_thing(engine, "volume", one["Name"], one["Labels"]) for one in volumes]
    return [thing for thing in found if thing is not None]


def orphans(found: Sequence[Thing], dead_hosts: Collection[str] = (), bundles: bool = False) -> list[Thing]:
    """Those that nobody will use again. `dead_hosts`: hosts whose owners count as dead where they cannot be judged."""
    dead = [one for one in found if one.alive is False or (one.alive is None and one.owner.host in dead_hosts)]
    return [one for one in found if (bundles if one.shared else one in dead)]


async def remove(engine: Engine, orphaned: Sequence[Thing]) -> list[Thing]:
    """Remove them and say which are gone by us. A volume or network that is in use again stays."""
    return [thing for thing in orphaned if await _removed(engine, thing)]


async def _removed(engine: Engine, thing: Thing) -> bool:
    with engine.telling(f"removing the {thing.kind} {thing.name}"):
        try:
            if thing.kind == "container":
                await engine.container(thing.name).delete(force=True, v=True)
            elif thing.kind == "network":
                await DockerNetwork(engine.docker, thing.name).delete()
            else:
                await DockerVolume(engine.docker, thing.name).delete()
        except aiodocker.DockerError as error:
            if error.status not in GONE and "has active endpoints" not in error.message:
                raise
            return False
    return True


def _thing(
    engine: Engine, kind: Literal["container", "network", "volume"], name: str, labels: dict[str, Any]
) -> Thing | None:
    owner = owner_of(labels) or (NOBODY if kind == "volume" and labels[KIND] in SHARED else None)
    if owner is None:
        return None
    return Thing(
        engine=engine.address,
        kind=kind,
        name=name,
        purpose=labels[KIND],
        run=labels.get(RUN, ""),
        owner=owner,
        alive=owner.alive(local=engine.local),
    )
