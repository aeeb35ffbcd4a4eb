"""Removes what dead owners left on this machine and on Docker daemons, so that nothing outlives its run.

`harness run` does this at its start, each worker process of a cluster before its first attempt, `sandboxes gc` by hand.
An owner is identified by host, boot, process namespace, pid and start time, so a reused pid or another machine's is
never taken for it. Left out: owners that cannot be checked from here; `sandboxes ls` lists their resources.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes.base import SandboxError
from sandboxes.docker.daemon import DockerDaemon, usual_endpoint
from sandboxes.docker.leftovers import DockerResource, list_resources, remove_resources, select_orphans
from sandboxes.docker.shims import IdleShim, idle_shims
from sandboxes.local.leftovers import ListedSandbox, list_sandboxes, remove_orphans

DAEMON_SECONDS = 300.0


@dataclass
class Inventory:
    """Sandboxes and Docker resources that exist, or that were removed."""

    sandboxes: list[ListedSandbox] = field(default_factory=list)
    """Directories and processes of this machine."""
    resources: list[DockerResource] = field(default_factory=list)
    """Containers, networks and volumes on Docker daemons."""
    shims: list[IdleShim] = field(default_factory=list)
    """Processes of this machine that a killed daemon left."""
    troubles: list[str] = field(default_factory=list)
    """One sentence for each daemon that did not answer, and for each thing that cannot be removed."""


@dataclass(frozen=True, kw_only=True)
class SearchScope:
    """The daemons and the directory to look at."""

    daemons: Sequence[str] | None = None
    """Addresses of Docker daemons; None: the usual one, if there is one."""
    root: Path | None = None
    """Directory of the sandboxes without Docker; None: the default one."""


def remove_leftovers(
    where: SearchScope = SearchScope(),  # noqa: B008 (frozen)
    *,
    dead_hosts: Collection[str] = (),
    bundles: bool = False,
) -> Inventory:
    """Remove what dead owners left; return what was removed, and what went wrong."""
    stuck: list[str] = []

    async def removed(daemon: DockerDaemon) -> list[DockerResource]:
        orphaned = select_orphans(await list_resources(daemon), dead_hosts, bundles)
        return await remove_resources(daemon, orphaned, stuck.append)

    seen = asyncio.run(_everywhere(where, removed))
    seen.troubles += stuck
    seen.sandboxes = remove_orphans(where.root, seen.troubles.append)
    seen.shims = list(idle_shims())
    return seen


def list_all(where: SearchScope) -> Inventory:
    """Return all sandboxes and resources, whoever owns them."""
    seen = asyncio.run(_everywhere(where, list_resources))
    seen.sandboxes = list_sandboxes(where.root)
    seen.shims = list(idle_shims())
    return seen


async def _everywhere(where: SearchScope, ask: Callable[[DockerDaemon], Awaitable[list[DockerResource]]]) -> Inventory:
    seen = Inventory()

    async def one(address: str) -> None:
        try:
            async with asyncio.timeout(DAEMON_SECONDS):
                daemon = await DockerDaemon.open(address)
                try:
                    seen.resources += await ask(daemon)
                finally:
                    await daemon.close()
        except SandboxError as error:
            seen.troubles.append(str(error))
        except TimeoutError:
            seen.troubles.append(f"the Docker daemon at {address} did not answer for {DAEMON_SECONDS:g} s")

    try:
        addresses = usual_daemons() if where.daemons is None else where.daemons
    except SandboxError as error:
        seen.troubles.append(str(error))
        return seen
    await asyncio.gather(*map(one, dict.fromkeys(addresses)))
    return seen


def usual_daemons() -> list[str]:
    """Return the daemon that is meant where none is named; none where there is none. DaemonError when it is unclear."""
    endpoint = usual_endpoint()
    return [] if endpoint is None else [endpoint.address]
