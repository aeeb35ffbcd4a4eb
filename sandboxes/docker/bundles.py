"""Bundles as read-only volumes of a daemon, uploaded once per content: task images stay untouched, near and far alike.

A volume's name says what is in it: blackforge-bundle-NAME-VERSION-DIGEST. It counts once its manifest is in it, which
the archive that fills it ends with, so one whose upload was broken off is filled again. Whoever looks or fills holds a
container named after the volume, never started, that mounts it: the daemon gives that name to one at a time. Volumes
belong to the daemon and outlive their runs; `sandboxes gc --bundles` removes those that no container has.

Bind mounts instead save the upload and the second copy. They need a daemon that sees this machine's files under the
same paths, which a local address does not promise, so they are chosen and not guessed.
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

from sandboxes.base import SandboxError, Spec
from sandboxes.bundles import AGENTS, MANIFEST, RUNTIME, RUNTIME_NAME, BundleManifest, read_manifest
from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.labels import IMAGE, KIND, PREFIX, SHARED, labels_of, read_owner, this_process
from sandboxes.docker.wiring import Supply

Way = Literal["volume", "bind"]
NAME, VERSION, DIGEST = (PREFIX + "bundle." + name for name in ("name", "version", "digest"))
VOLUMES = "blackforge-bundle-"
"""What the names of bundles' volumes begin with."""
EMPTY = "blackforge/empty:1"
"""An image without a file, for containers that are never started."""
INSIDE = "/bundle"
CHUNK = 1 << 20
UPLOAD_SECONDS = 1800.0
POLL_SECONDS = 0.2


@dataclass
class Bundles:
    """Gives each container its agent's bundle and the runtime."""

    daemon: DockerDaemon
    directory: Path
    """The bundles on this machine, each in a directory of its name."""
    way: Way = "volume"
    _ready: dict[str, "asyncio.Task[str]"] = field(default_factory=dict)
    """Name of a bundle -> its volume, while it is made ready and from then on."""

    async def supply(self, sandbox: str, spec: Spec) -> Supply:
        targets = {RUNTIME_NAME: RUNTIME} | ({spec.agent: f"{AGENTS}/{spec.agent}"} if spec.agent else {})
        return Supply(mounts=[await self._mount(name, target) for name, target in targets.items()], bundles=AGENTS)

    async def release(self, sandbox: str) -> None:
        """Volumes stay for the next sandbox."""

    async def close(self) -> None:
        """End the uploads that nobody waits for any more, and remove what held their volumes."""
        for task in self._ready.values():
            task.cancel()
        await asyncio.gather(*self._ready.values(), return_exceptions=True)

    async def _mount(self, name: str, target: str) -> Mapping[str, Any]:
        mount = {"Type": self.way, "Target": target, "ReadOnly": True}
        if self.way == "bind":
            self._manifest(name)
            return mount | {"Source": str(self.directory / name)}
        task = self._ready.get(name)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._ready[name] = asyncio.create_task(self._volume(name))
        # one sandbox that is given up does not end what others wait for
        return mount | {"Source": await asyncio.shield(task), "VolumeOptions": {"NoCopy": True}}

    def _manifest(self, name: str) -> BundleManifest:
        manifest = read_manifest(self.directory / name)
        if manifest is None:
            raise SandboxError(f"there is no bundle {self.directory / name}; run: harness agents install {name}")
        return manifest

    async def _volume(self, name: str) -> str:
        """The name of the bundle's volume on the daemon, filled."""
        manifest = await asyncio.to_thread(self._manifest, name)
        volume = volume_of(manifest)
        with self.daemon.translating_errors(f"the bundle {name} in volume {volume}"):
            async with _held(self.daemon.docker, volume, manifest) as container:
                if not await _filled(container):
                    await _fill(self.daemon.docker, container, self.directory / name)
        return volume


def volume_of(manifest: BundleManifest) -> str:
    """The name of the volume for a bundle of this content."""
    return f"{VOLUMES}{manifest.name}-{manifest.version}-{manifest.digest[:12]}"


@asynccontextmanager
async def _held(docker: aiodocker.Docker, volume: str, manifest: BundleManifest) -> AsyncIterator[DockerContainer]:
    """The one container that may fill the volume. Waits for another's, or removes it if its owner is dead."""
    described = {NAME: manifest.name, VERSION: manifest.version, DIGEST: manifest.digest}
    labels = labels_of(SHARED[0], this_process()) | described
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
            request = docker._query(
                where, "PUT", params={"path": INSIDE}, data=_chunks(archive), headers=kind, timeout=patience
            )
            async with request as answer:
                await answer.read()
    finally:  # with its reader closed the packing ends in any case
        with suppress(BrokenPipeError):
            await packing


async def _chunks(archive: io.FileIO) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(archive.read, CHUNK):
        yield chunk


def _pack(directory: Path, writer: int) -> None:
    """Write a bundle as a tar archive: root's, unwritable, its manifest last."""
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
    """The name of an image without a file, which is made where it is missing."""
    try:
        await docker.images.inspect(EMPTY)
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise
        repository, _, tag = EMPTY.partition(":")
        # labelled like whatever is ours, but nobody's: like the volumes it stays
        parameters = {"fromSrc": "-", "repo": repository, "tag": tag, "changes": f"LABEL {KIND}=bundle {IMAGE}={EMPTY}"}
        async with docker._query("images/create", "POST", params=parameters, data=_empty_archive()) as answer:
            await answer.read()
    return EMPTY


def _empty_archive() -> bytes:
    content = io.BytesIO()
    with closing(tarfile.open(fileobj=content, mode="w")) as archive:
        archive.addfile(tarfile.TarInfo(INSIDE.strip("/") + "/.keep"))
    return content.getvalue()
