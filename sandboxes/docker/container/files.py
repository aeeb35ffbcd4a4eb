"""Copies files into and out of a container by commands inside it.

The daemon's own copying refuses read-only containers and does not see what is mounted in them (Docker 20.10 to 28).
Each command has only the rights of the user it copies for. On the way in, a link or file in place of a directory is
replaced, and a file is always created new, so a planted link leads nowhere. On the way out only regular files are
opened, and the archive is unpacked without writing through a link. The image needs /bin/sh, head, and tar for
directories. Left out: owners and special files of a copied directory.
"""

import asyncio
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Self

from sandboxes.base import SandboxError
from sandboxes.docker.container.end_mark import EndMark
from sandboxes.docker.daemon import ContainerCommand, DockerDaemon
from sandboxes.output import BoundedOutput

CHUNK = 1 << 18
COPY_SECONDS = 600.0
READ_SECONDS = 60.0
HEADER_BYTES = 1 << 20
"""Maximum size of a tar member's name or other attributes, which are read into memory at once."""
SYSTEM_LINKS = "/bin|/sbin|/lib|/lib32|/lib64|/libx32|/var/run|/var/lock"
"""Links that distributions ship; these are followed."""

_MAKE_WAY = rf"""
make_way() {{
    at= rest=${{1#/}}
    while [ -n "$rest" ]; do
        part=${{rest%%/*}}
        case "$rest" in */*) rest=${{rest#*/}} ;; *) rest= ;; esac
        [ -n "$part" ] || continue
        at=$at/$part
        case "$at" in {SYSTEM_LINKS}) continue ;; esac
        if [ -L "$at" ] || {{ [ -e "$at" ] && [ ! -d "$at" ]; }}; then rm -f "$at" || exit 1; fi
        [ -d "$at" ] || mkdir "$at" || exit 1
        [ -w "$at" ] || [ ! -O "$at" ] || chmod u+rwx "$at"
    done
}}
"""
WRITE = (
    _MAKE_WAY
    + r"""
set -C  # a file that is there after all is not opened
make_way "${1%/*}"
rm -rf "$1" && head -c "$2" >"$1"
"""
)
"""Arguments: path, size in bytes. The input is the content."""
READ = r"""
[ -f "$1" ] && [ ! -L "$1" ] && [ -r "$1" ] || exit 3
head -c "$2" "$1"
"""
PUT = (
    _MAKE_WAY
    + r"""
make_way "$1"
left=$2
while [ "$left" -gt 0 ]; do
    IFS= read -r directory || exit 1  # shells read byte by byte here, so none of the archive
    make_way "$1/$directory"
    left=$((left - 1))
done
cd "$1" && head -c "$3" | tar -x -o -f -
"""
)
"""Arguments: path, number of directories, bytes of the archive. The input: their names, a line each, then it."""
GET = r"""
[ -d "$1" ] || exit 3
cd "$1" && tar -c -f - .
"""


class ContainerFiles:
    """The files of one container, with the rights of one of its users."""

    def __init__(self, daemon: DockerDaemon, container: str, user: str):
        self._daemon, self._container, self._user = daemon, container, user

    async def write(self, path: str, content: bytes) -> None:
        output = BoundedOutput(2000)
        command = self._command(WRITE, path, str(len(content)), stdin=_pieces(content))
        if code := await self._bounded(command, output.add, COPY_SECONDS):
            raise SandboxError(f"{path} cannot be written in {self._container} (exit code {code}: {_last(output)})")

    async def read(self, path: str, limit: int) -> bytes | None:
        content = bytearray()

        def add(chunk: bytes) -> None:
            content.extend(chunk)
            if len(content) > limit + CHUNK:  # with room for what a head that fails says
                raise SandboxError(
                    f"reading {path} in {self._container} gave more than the {limit} bytes that were asked for, so its "
                    "head or shell was replaced; use a fresh sandbox"
                )

        code = await self._whole(self._command(READ, path, str(limit)), add, READ_SECONDS)
        if code not in (0, 3):
            raise SandboxError(f"{path} cannot be read in {self._container} (exit code {code}: {content[-200:]!r})")
        return None if code else bytes(content[:limit])

    async def put(self, source: Path, path: str) -> None:
        output = BoundedOutput(2000)
        with tempfile.TemporaryFile() as archive:
            try:
                directories = await asyncio.to_thread(_pack, source, archive)
            except OSError as error:
                raise SandboxError(f"{source} cannot be read to be copied into {self._container} ({error})") from error
            count, size = str(len(directories)), str(archive.seek(0, 2))
            names = os.fsencode("".join(f"{name}\n" for name in directories))
            command = self._command(PUT, path, count, size, stdin=_in_turn(_pieces(names), _blocks(archive)))
            if code := await self._bounded(command, output.add, COPY_SECONDS):
                raise SandboxError(
                    f"{source} cannot be copied to {path} in {self._container} (exit code {code}: {_last(output)})"
                )

    async def get(self, path: str, target: Path, limit: int) -> None:
        """Copy a directory out. SandboxError when its archive has more than `limit` bytes."""
        with tempfile.TemporaryFile() as archive:
            sink = _Archive(archive, limit, f"{path} in {self._container}")
            code = await self._whole(self._command(GET, path), sink.add, COPY_SECONDS)
            if code == 3:
                raise SandboxError(f"there is no directory {path} in {self._container} to be copied out")
            if code:
                raise SandboxError(
                    f"{path} cannot be copied out of {self._container} (exit code {code}); its image needs tar"
                )
            archive.seek(0)
            try:
                await asyncio.to_thread(unpack, archive, target)
            except Exception as error:  # whatever a forged archive does to the parser
                raise SandboxError(f"{path} of {self._container} cannot be unpacked to {target} ({error})") from error

    def _command(self, script: str, *arguments: str, stdin: AsyncIterator[bytes] | None = None) -> ContainerCommand:
        return ContainerCommand(argv=("/bin/sh", "-c", script, "sh", *arguments), user=self._user, stdin=stdin)

    async def _whole(self, command: ContainerCommand, sink: Callable[[bytes], None], seconds: float) -> int:
        """Run a command whose output is the content; SandboxError when the daemon has lost the end of it."""
        mark = EndMark(sink)
        code = await self._bounded(mark.on(command), mark.add, seconds)
        if mark.end(code):
            raise SandboxError(f"the Docker daemon lost the end of a file or directory of {self._container}; try again")
        return code

    async def _bounded(self, command: ContainerCommand, sink: Callable[[bytes], None], seconds: float) -> int:
        """Run a command with a time limit: a FIFO, or an agent that stops our process, must not hang us."""
        try:
            async with asyncio.timeout(seconds):
                return await self._daemon.execute(self._container, command, sink)
        except TimeoutError as error:
            raise SandboxError(f"a file of {self._container} took longer than {seconds:.0f} s") from error


class _Archive:
    """Writes an archive to a file as it arrives, up to a limit."""

    def __init__(self, file: IO[bytes], limit: int, name: str):
        self._file, self._left, self._limit, self._name = file, limit, limit, name

    def add(self, chunk: bytes) -> None:
        self._left -= len(chunk)
        if self._left < 0:
            raise SandboxError(f"{self._name} holds more than {self._limit >> 20} MB, so it is not copied out")
        self._file.write(chunk)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), CHUNK):
        yield content[start : start + CHUNK]


async def _blocks(file: IO[bytes]) -> AsyncIterator[bytes]:
    file.seek(0)
    while chunk := file.read(CHUNK):
        yield chunk


async def _in_turn(*parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        async for piece in part:
            yield piece


def _pack(source: Path, archive: IO[bytes]) -> list[str]:
    """Archive a directory and return the names of the directories in it."""
    names: list[str] = []

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        if "\n" in member.name:
            raise OSError(f"a name with a line break: {member.name!r}")
        if member.isdir():
            names.append(member.name)
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT, dereference=False) as tar:
        for child in sorted(source.iterdir()):
            tar.add(child, child.name, filter=anonymous)
    return names


class _Member(tarfile.TarInfo):
    """A tar header that may be forged: an agent that is root may have replaced tar."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.size > HEADER_BYTES and member.type not in (*tarfile.REGULAR_TYPES, tarfile.GNUTYPE_SPARSE):
            raise tarfile.ReadError(f"a header of {member.size} bytes")
        return member


def unpack(archive: IO[bytes], target: Path) -> None:
    """Unpack an archive of an untrusted container: directories and files first, links last, nothing outside `target`.

    Skips sparse files, which could be of any size for whoever copies them next.
    """
    target.mkdir(parents=True, exist_ok=True)
    links: list[tarfile.TarInfo] = []
    with tarfile.open(fileobj=archive, mode="r:", tarinfo=_Member) as tar:
        for member in tar:
            if member.issparse():
                continue
            try:
                safe = tarfile.data_filter(member, str(target))
            except tarfile.FilterError:
                continue
            if _leads_out(safe.name) or _leads_out(safe.linkname if safe.islnk() else ""):
                continue
            if safe.issym():
                links.append(safe)
            elif safe.isdir() or safe.isreg() or (safe.islnk() and (target / safe.linkname).is_file()):
                tar.extract(safe, target, filter="data")
        for link in links:
            place = target / link.name
            if (
                not place.exists()
                and not place.is_symlink()
                and place.parent.resolve().is_relative_to(target.resolve())
            ):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(link.linkname)


def _leads_out(name: str) -> bool:
    return name.startswith("/") or ".." in Path(name).parts


def _last(output: BoundedOutput) -> str:
    return output.text().strip()[-300:] or "it printed nothing"
