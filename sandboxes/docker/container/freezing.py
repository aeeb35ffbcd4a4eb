"""Halts a container from outside, reads its files while nothing in it runs, and restarts it with the same files.

Nothing inside is asked or trusted: the daemon pauses the container by its control group, so also threads whose process
has exited, forks and traced processes stand still, and it reads the files itself. The writable places of a strict
sandbox are volumes in memory, which the daemon sees, and which go when the last container that mounts them stops. So
while a container is killed, a holder (a container of ours in which nothing of the agent runs) keeps them mounted.
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import PurePosixPath
from typing import IO, Any

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer

from sandboxes.base import SandboxError
from sandboxes.docker.daemon import DockerDaemon, start_container
from sandboxes.docker.labels import KIND
from sandboxes.docker.profiles import SLEEPER

CHUNK = 1 << 20
LINK = 1 << 27
"""The bit of Go's file modes that marks a symbolic link."""
PACK_SECONDS = 600.0
PAUSE_TRIES, PAUSE_SECONDS = 5, 0.2
KILL_SECONDS = 60.0
"""Time for a killed container to end. One with a process that the kernel cannot end would keep us waiting for ever."""

log = logging.getLogger(__name__)


async def freeze(daemon: DockerDaemon, container: str, holder: Mapping[str, Any] | None) -> bool:
    """Halt a container and return whether it was killed for that; otherwise it is paused.

    It is killed where pausing fails, as it may while processes fork without end (runc 1.1, cgroup v1). `holder`: what
    then keeps its volumes. None: its files outlive its main process anyway.
    """
    target = daemon.container(container)
    with daemon.translating_errors(f"halting {container}"):
        try:
            await target.pause()
            return False
        except aiodocker.DockerError as error:
            state = (await target.show())["State"]
            if state["Paused"]:
                return False
            if not state["Running"]:
                if holder is not None:
                    ended = f"the main process of {container} has ended, and the files of the sandbox with it"
                    raise SandboxError(ended) from error
                return True
            log.info("%s cannot be paused, so it is killed (%s)", container, error.message)
        await kill(daemon, container, holder)
    return True


async def pause(container: DockerContainer) -> None:
    """Pause a running container. Tried some times, as runc gives up where processes fork or the machine is busy."""
    for left in reversed(range(PAUSE_TRIES)):
        try:
            return await container.pause()
        except aiodocker.DockerError:
            if not left:
                raise
            await asyncio.sleep(PAUSE_SECONDS)


async def thaw(daemon: DockerDaemon, container: str) -> None:
    """Let a paused container go on. Looked at some times, as the event of an earlier thaw may come after a pause, and
    the daemon then takes the container for running for a moment."""
    target = daemon.container(container)
    with daemon.translating_errors(f"letting {container} go on"):
        for left in reversed(range(PAUSE_TRIES)):
            if (await target.show())["State"]["Paused"]:
                return await target.unpause()
            if left:
                await asyncio.sleep(PAUSE_SECONDS)


async def kill(daemon: DockerDaemon, container: str, holder: Mapping[str, Any] | None) -> None:
    """Kill a container, and keep its volumes in memory with a holder."""
    target = daemon.container(container)
    with daemon.translating_errors(f"ending {container}"):
        try:
            if holder is not None:
                await start_container(await daemon.docker.containers.create(dict(holder), name=holder_of(container)))
            if (await target.show())["State"]["Running"]:
                await target.kill()
                await _until_ended(target)
        except BaseException:  # also when cancelled: half a change must not stay
            await asyncio.shield(release(daemon, container))
            raise


async def _until_ended(target: DockerContainer) -> None:
    try:
        async with asyncio.timeout(KILL_SECONDS):
            await target.wait()
    except TimeoutError as error:
        raise SandboxError(f"{target.id} was killed and has not ended after {KILL_SECONDS:.0f} s") from error


async def start_again(daemon: DockerDaemon, container: str) -> float:
    """Start a killed container and return when it had ended, in seconds since the epoch. Its holder goes."""
    target = daemon.container(container)
    with daemon.translating_errors(f"restarting {container}"):
        ended = datetime.fromisoformat((await target.show())["State"]["FinishedAt"])
        try:
            await start_container(target)
        finally:
            await asyncio.shield(release(daemon, container))
    return ended.timestamp()


async def release(daemon: DockerDaemon, container: str) -> None:
    """Remove the holder of a container, if there is one."""
    try:
        await daemon.container(holder_of(container)).delete(force=True)
    except aiodocker.DockerError as error:
        if error.status != 404:  # it was never made
            raise


def holder_of(container: str) -> str:
    return f"{container}-holder"


def holder_config(container: str, image: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration of a holder of this container's volumes."""
    rights = {"CapDrop": ["ALL"], "SecurityOpt": ["no-new-privileges"], "ReadonlyRootfs": True, "PidsLimit": 16}
    return {
        "Image": image,
        "Entrypoint": list(SLEEPER[:1]),
        "Cmd": list(SLEEPER[1:]),
        "User": "0:0",
        "WorkingDir": "/",
        "Labels": {**labels, KIND: "holder"},
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {"NetworkMode": "none", "VolumesFrom": [container], "Init": True, **rights},
    }


async def pack(daemon: DockerDaemon, container: str, path: str, place: str, archive: IO[bytes], limit: int) -> bool:
    """Write what lies at a path as a tar archive. False when nothing is there, or a link leads there.

    Below `place`, the writable place that the path lies in, no component may be a link: the daemon follows links, also
    to what the agent itself may not read.
    """
    try:
        async with asyncio.timeout(PACK_SECONDS):
            with daemon.translating_errors(f"packing {path} of {container}"):
                for at in _below(place, path):
                    if await _mode(daemon, container, at) & LINK:
                        return False
                await download(daemon, container, path, archive, limit)
    except _NothingThere:
        return False
    except TimeoutError as error:
        raise SandboxError(f"{path} of {container} was not packed after {PACK_SECONDS:.0f} s") from error
    return True


class _NothingThere(SandboxError):
    """Nothing lies at the path that was asked for."""


@asynccontextmanager
async def _archive(daemon: DockerDaemon, container: str, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """Ask the daemon for what lies at a path. _NothingThere when nothing does. The caller limits the time."""
    patience = aiohttp.ClientTimeout(total=None, sock_connect=20)
    try:
        query = daemon.docker._query(f"containers/{container}/archive", params={"path": path}, timeout=patience)
        async with query as response:  # aiodocker's own verb holds the whole archive in memory
            try:
                yield response
            finally:
                response.close()
    except aiodocker.DockerError as error:
        if error.status == 404 and "No such container:" not in error.message.partition(path)[0]:
            raise _NothingThere(f"there is no {path} in {container}") from error
        raise


async def download(daemon: DockerDaemon, container: str, path: str, archive: IO[bytes], limit: int) -> None:
    """Write what lies at a path as a tar archive. SandboxError when it exceeds `limit` bytes, or nothing is there."""
    left = limit
    async with _archive(daemon, container, path) as response:
        async for chunk in response.content.iter_chunked(CHUNK):
            left -= len(chunk)
            if left < 0:
                raise SandboxError(f"{path} in {container} holds more than {limit >> 20} MB")
            archive.write(chunk)


def _below(place: str, path: str) -> list[str]:
    """Return the paths between `place` and `path`, the last included."""
    rest = PurePosixPath(path).relative_to(place).parts
    return [str(PurePosixPath(place, *rest[: number + 1])) for number in range(len(rest))]


async def _mode(daemon: DockerDaemon, container: str, path: str) -> int:
    """Return the mode of what lies at a path, as Go writes it. Its last component is not followed."""
    async with _archive(daemon, container, path) as response:  # aiodocker fails on a HEAD that finds nothing
        return int(json.loads(base64.b64decode(response.headers["X-Docker-Container-Path-Stat"]))["mode"])
