"""Bundles as read-only volumes of a daemon, uploaded once per content, so that task images stay untouched.

A volume's name says what it holds: blackforge-bundle-NAME-VERSION-DIGEST. It is complete once it holds the manifest,
which is the last file of the uploaded archive; a volume whose upload broke off is filled again. To check or fill a
volume, a process first creates a container named after it, which mounts it and is never started. The daemon gives that
name to one process at a time, so the container serves as a lock. Volumes belong to the daemon and outlive their runs;
`sandboxes gc --bundles` removes those that no container uses.

Bind mounts save the upload and the second copy. They need a daemon that sees this machine's files under the same paths,
which a local address does not guarantee, so the user has to choose them.
"""

import asyncio
import io
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.volumes import DockerVolume

from sandboxes.base import SandboxError, Spec
from sandboxes.bundles import AGENTS, MANIFEST, RUNTIME, RUNTIME_NAME, BundleManifest, read_manifest
from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.labels import IMAGE, KIND, PREFIX, SHARED, labels_of, read_owner, this_process
from sandboxes.docker.wiring import Supply

Way = Literal["volume", "bind"]
NAME, VERSION, DIGEST = (PREFIX + "bundle." + name for name in ("name", "version", "digest"))
VOLUMES = "blackforge-bundle-"
"""Prefix of the names of bundles' volumes."""
EMPTY = "blackforge/empty:1"
"""An empty image, for containers that are never started."""
INSIDE = "/bundle"
CHUNK = 1 << 20
UPLOAD_SECONDS = 1800.0
POLL_SECONDS = 0.2


@dataclass
class Bundles:
    """Mounts the agent's bundle and the runtime into each container."""

    daemon: DockerDaemon
    directory: Path
    """Directory of the bundles on this machine, each below it under its name."""
    way: Way = "volume"
    _ready: dict[str, "asyncio.Task[str]"] = field(default_factory=dict)
    """Name of a bundle -> task that fills its volume and returns the volume's name. Kept while the volume is there."""

    async def supply(self, sandbox: str, spec: Spec) -> Supply:
        targets = {RUNTIME_NAME: RUNTIME} | ({spec.agent: f"{AGENTS}/{spec.agent}"} if spec.agent else {})
        return Supply(mounts=[await self._mount(name, target) for name, target in targets.items()], bundles=AGENTS)

    async def release(self, sandbox: str) -> None:
        """Do nothing: volumes stay for the next sandbox."""

    async def close(self) -> None:
        """Cancel uploads that nobody waits for any more, and remove their containers."""
        for task in self._ready.values():
            task.cancel()
        await asyncio.gather(*self._ready.values(), return_exceptions=True)

    async def _mount(self, name: str, target: str) -> Mapping[str, Any]:
        mount = {"Type": self.way, "Target": target, "ReadOnly": True}
        if self.way == "bind":
            self._manifest(name)
            return mount | {"Source": str(self.directory / name)}
        await self._forget_removed(name)
        task = self._ready.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._ready[name] = asyncio.create_task(self._volume(name))
        # shielded: other sandboxes may wait for the same upload
        return mount | {"Source": await asyncio.shield(task), "VolumeOptions": {"NoCopy": True}}

    async def _forget_removed(self, name: str) -> None:
        """Forget a filled volume that has been removed: a container would get an empty one of the same name."""
        task = self._ready.get(name)
        if task is None or not task.done() or task.cancelled() or task.exception():
            return
        with self.daemon.translating_errors(f"the volume {task.result()} of the bundle {name}"):
            kept = await _labelled(self.daemon.docker, task.result())
        if not kept and self._ready.get(name) is task:  # else it is being filled again
            del self._ready[name]

    def _manifest(self, name: str) -> BundleManifest:
        manifest = read_manifest(self.directory / name)
        if manifest is None:
            raise SandboxError(f"there is no bundle {self.directory / name}; run: harness agents install {name}")
        return manifest

    async def _volume(self, name: str) -> str:
        """Fill the bundle's volume on the daemon if needed, and return its name."""
        manifest = await asyncio.to_thread(self._manifest, name)
        volume = volume_of(manifest)
        with self.daemon.translating_errors(f"the bundle {name} in volume {volume}"):
            async with _locked(self.daemon.docker, volume, manifest) as container:
                if not await _filled(container):
                    await _fill(self.daemon.docker, container, self.directory / name)
        return volume


def volume_of(manifest: BundleManifest) -> str:
    """Return the name of the volume for a bundle of this content."""
    return f"{VOLUMES}{manifest.name}-{manifest.version}-{manifest.digest[:12]}"


@asynccontextmanager
async def _locked(docker: aiodocker.Docker, volume: str, manifest: BundleManifest) -> AsyncIterator[DockerContainer]:
    """Create the one container that may fill the volume. Wait for another process's; remove a dead process's."""
    described = {NAME: manifest.name, VERSION: manifest.version, DIGEST: manifest.digest}
    labels = labels_of(SHARED[0], this_process()) | described
    if await _labelled(docker, volume) is False:
        with suppress(aiodocker.DockerError):  # it is in use, or gone by now: then it is filled as it is
            await DockerVolume(docker, volume).delete()
    await docker.volumes.create({"Name": volume, "Labels": labels})
    mount = {"Type": "volume", "Source": volume, "Target": INSIDE, "VolumeOptions": {"NoCopy": True}}
    config = {
        "Image": await empty_image(docker),
        "Cmd": ["-"],
        "Labels": labels,
        "HostConfig": {"Mounts": [mount], "NetworkMode": "none"},
    }
    deadline = time.monotonic() + UPLOAD_SECONDS
    while (container := await _created(docker, config, f"{volume}-filling")) is None:
        if time.monotonic() > deadline:
            raise SandboxError(f"volume {volume} is being filled elsewhere; if not: docker rm {volume}-filling")
        await asyncio.sleep(POLL_SECONDS)
    try:
        yield container
    finally:
        await asyncio.shield(container.delete(force=True))


async def _labelled(docker: aiodocker.Docker, volume: str) -> bool | None:
    """Return whether a volume has our labels, by which it is listed and removed; None when there is none."""
    try:
        labels = (await DockerVolume(docker, volume).show())["Labels"]
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise
        return None
    return KIND in (labels or {})


async def _created(docker: aiodocker.Docker, config: Mapping[str, Any], name: str) -> DockerContainer | None:
    creating = asyncio.ensure_future(docker.containers.create(dict(config), name=name))
    try:
        return await asyncio.shield(creating)
    except aiodocker.DockerError as error:
        if error.status != 409:
            raise
    except asyncio.CancelledError:  # the daemon may have made it: nobody else would remove it while we live
        with suppress(aiodocker.DockerError):
            await (await creating).delete(force=True)
        raise
    with suppress(aiodocker.DockerError):  # it is gone by now
        other = await docker.containers.container(name).show()
        owner = read_owner(other["Config"]["Labels"])
        if owner is None or owner.alive() is False:
            await docker.containers.container(other["Id"]).delete(force=True)
    return None


async def _filled(container: DockerContainer) -> bool:
    try:
        await container.get_archive(f"{INSIDE}/{MANIFEST}")
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise
        return False
    return True


async def _fill(docker: aiodocker.Docker, container: DockerContainer, directory: Path) -> None:
    reader, writer = os.pipe()
    packing = asyncio.create_task(asyncio.to_thread(_pack, directory, writer))
    try:
        with open(reader, "rb", buffering=0) as archive:
            where, kind = f"containers/{container.id}/archive", {"Content-Type": "application/x-tar"}
            patience = aiohttp.ClientTimeout(total=UPLOAD_SECONDS)
            request = docker._query(  # aiodocker's own verb has no time limit
                where, "PUT", params={"path": INSIDE}, data=_chunks(archive), headers=kind, timeout=patience
            )
            async with request as answer:
                await answer.read()
    finally:  # the closed reader makes the packing thread end in any case
        with suppress(BrokenPipeError):
            await packing


async def _chunks(archive: io.FileIO) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(archive.read, CHUNK):
        yield chunk


def _pack(directory: Path, writer: int) -> None:
    """Write a bundle as a tar archive that belongs to root, with the manifest last."""
    with open(writer, "wb") as pipe, tarfile.open(fileobj=pipe, mode="w|", bufsize=CHUNK) as archive:
        for path in _in_order(directory):
            archive.add(path, str(path.relative_to(directory)), recursive=False, filter=_foreign)


def _in_order(directory: Path) -> Iterator[Path]:
    yield from sorted(path for path in directory.rglob("*") if path != directory / MANIFEST)
    yield directory / MANIFEST


def _foreign(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


async def empty_image(docker: aiodocker.Docker) -> str:
    """Create an empty image if it is missing, and return its name."""
    try:
        await docker.images.inspect(EMPTY)
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise
        repository, _, tag = EMPTY.partition(":")
        # labelled like whatever is ours, but nobody's: like the volumes it stays
        parameters = {"fromSrc": "-", "repo": repository, "tag": tag, "changes": f"LABEL {KIND}=bundle {IMAGE}={EMPTY}"}
        # aiodocker has no verb that imports an archive of files as an image.
        async with docker._query("images/create", "POST", params=parameters, data=_empty_archive()) as answer:
            await answer.read()
    return EMPTY


def _empty_archive() -> bytes:
    content = io.BytesIO()
    with closing(tarfile.open(fileobj=content, mode="w")) as archive:
        archive.addfile(tarfile.TarInfo(INSIDE.strip("/") + "/.keep"))
    return content.getvalue()
