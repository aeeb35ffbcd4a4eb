"""Reads and writes a sandbox's files from outside, for sandboxes that are directories of this machine.

Processes inside may be hostile. So each component of a path is opened by itself, relative to the one before and never
through a link: a link that an agent plants leads nowhere, even if it appears between two steps. Left out: sandboxes
with a file system of their own (Docker).
"""

import errno
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from sandboxes.local.removal import remove_below

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not hang us
_CHUNK = 1 << 20
MAX_DEPTH = 256
"""Directories below one another that `get` and `pack` go down: each takes an open file and a frame of the stack."""
MAX_ENTRIES = 200_000
"""Files, directories and links that `pack` takes: without a bound, empty ones would fill our memory and disk."""


@dataclass(frozen=True)
class SandboxPath:
    """A path below a directory of ours."""

    base: Path
    parts: Sequence[str]
    owner: int | None = None
    """User and group id for new files and directories; None: ours."""

    def below(self, *parts: str) -> "SandboxPath":
        return SandboxPath(self.base, (*self.parts, *parts), self.owner)


def write(place: SandboxPath, content: bytes | IO[bytes], mode: int = 0o644) -> None:
    """Write a file and its parent directories. Replace whatever stands in the way."""
    parent = _create(place.base, place.parts[:-1], place.owner)
    try:
        remove_below(parent, place.parts[-1])
        file = os.open(place.parts[-1], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode, dir_fd=parent)
        with os.fdopen(file, "wb") as opened:
            shutil.copyfileobj(io.BytesIO(content) if isinstance(content, bytes) else content, opened, _CHUNK)
            _give(file, place.owner)
    finally:
        os.close(parent)


def read(place: SandboxPath, limit: int) -> bytes | None:
    """Return the first `limit` bytes of a regular file; None where there is none."""
    try:
        parent = _open(place.base, place.parts[:-1])
    except OSError:
        return None
    try:
        file = os.open(place.parts[-1], _FILE, dir_fd=parent)
    except OSError:
        return None
    finally:
        os.close(parent)
    try:
        return os.read(file, limit) if stat.S_ISREG(os.fstat(file).st_mode) else None
    finally:
        os.close(file)


def put(source: Path, place: SandboxPath) -> None:
    """Copy a directory into the sandbox: directories, regular files, links. OSError when some of it is unreadable."""

    def unread(error: OSError) -> None:
        raise error

    os.close(_create(place.base, place.parts, place.owner))
    for directory, names, files in os.walk(source, onerror=unread):
        here = place.below(*Path(directory).relative_to(source).parts)
        for name in (*names, *files):
            path = Path(directory, name)
            if path.is_symlink():
                _link(path.readlink(), here.below(name))
            elif path.is_dir():
                os.close(_create(here.base, (*here.parts, name), here.owner))
            elif path.is_file():
                with path.open("rb") as file:
                    write(here.below(name), file, stat.S_IMODE(path.stat().st_mode))


def get(place: SandboxPath, target: Path, limit: int) -> None:
    """Copy a directory of at most `limit` bytes out: directories, regular files and links, as far as they are readable.

    Links are created last, so that nothing is written through one. OSError when there is more than `limit`, or deeper.
    """
    top = _open(place.base, place.parts)
    links: list[tuple[Path, str]] = []
    left = limit
    try:
        for directory, names, files, here in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            if directory.count("/") >= MAX_DEPTH:
                raise OSError(errno.ENAMETOOLONG, f"it is deeper than {MAX_DEPTH} directories")
            into = target / directory
            into.mkdir(parents=True, exist_ok=True)
            for name in (*names, *files):
                mode = os.stat(name, dir_fd=here, follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    links.append((into / name, os.readlink(name, dir_fd=here)))
                elif stat.S_ISREG(mode):
                    left -= _copy_out(name, here, into / name, left)
    finally:
        os.close(top)
    for path, content in links:
        if path.is_symlink() or not path.is_dir():  # else it has turned into a directory meanwhile
            path.unlink(missing_ok=True)
            path.symlink_to(content)


class _Archive:
    """A tar archive that takes so many bytes and entries, and no more."""

    def __init__(self, tar: tarfile.TarFile, limit: int):
        self._tar, self._left = tar, limit
        self._entries = MAX_ENTRIES - 1  # the place itself is one

    def add(self, member: tarfile.TarInfo, source: IO[bytes] | None = None) -> None:
        """Add an entry, which takes its header and its names besides its content. OSError when that is too much."""
        self._left -= member.size + tarfile.BLOCKSIZE + len(os.fsencode(member.name + member.linkname))
        if self._left < 0:
            raise OSError(errno.EFBIG, "it holds more than may be copied out")
        self._tar.addfile(member, source)
        self._tar.members.clear()  # type: ignore[attr-defined]  # the library keeps every header that it has written

    def names(self, here: int) -> list[str]:
        """Return the names in a directory. OSError, before all are read, when they are too many."""
        with os.scandir(here) as found:
            names = [entry.name for entry in islice(found, self._entries + 1)]
        self._entries -= len(names)
        if self._entries < 0:
            raise OSError(errno.EFBIG, f"it holds more than {MAX_ENTRIES} files")
        return names


def pack(place: SandboxPath, archive: IO[bytes], limit: int) -> bool:
    """Write a file or directory as a tar archive, whose names begin with `data`. False when nothing is there.

    OSError when there are more than `limit` bytes, headers and names included, or more than MAX_ENTRIES. Reads through
    no link. No process may change the files meanwhile. Special files, and directories deeper than MAX_DEPTH, become
    FIFOs, which nobody unpacks: so a reader sees that they were there, and an agent cannot prevent a verdict by a deep
    tree.
    """
    try:
        here = _open(place.base, place.parts[:-1])
    except (FileNotFoundError, NotADirectoryError):
        return False
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT, errors="surrogateescape") as tar:
        try:
            last = place.parts[-1] if place.parts else "."
            if not _is_directory(last, here):
                _pack_one(_Archive(tar, limit), last, here, "data")
                return True
            top = _enter(last, here)
        except FileNotFoundError:
            return False
        finally:
            os.close(here)
        try:
            _pack_directory(_Archive(tar, limit), top, "data")
        finally:
            os.close(top)
    return True


def _pack_directory(archive: _Archive, here: int, at: str) -> None:
    archive.add(_member(at, os.fstat(here)))
    deepest = at.count("/") >= MAX_DEPTH
    for name in archive.names(here):
        if deepest or not _is_directory(name, here):
            _pack_one(archive, name, here, f"{at}/{name}")
            continue
        _unlock(name, here, 0o700)
        try:
            below = _enter(name, here)
        except PermissionError:  # another user's: only root reads it
            continue
        try:
            _pack_directory(archive, below, f"{at}/{name}")
        finally:
            os.close(below)


def _pack_one(archive: _Archive, name: str, here: int, at: str) -> None:
    """Pack what is not entered. What is neither a file nor a link becomes a FIFO."""
    state = os.stat(name, dir_fd=here, follow_symlinks=False)
    member = _member(at, state)
    if stat.S_ISLNK(state.st_mode):
        member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=here)
        return archive.add(member)
    if not stat.S_ISREG(state.st_mode):
        member.type = tarfile.FIFOTYPE
        return archive.add(member)
    _unlock(name, here, 0o400)
    with os.fdopen(os.open(name, _FILE, dir_fd=here), "rb") as source:
        member.size = state.st_size
        archive.add(member, source)


def _unlock(name: str, here: int, needed: int) -> None:
    """Give ourselves permissions that the sandbox took away. `name` is no link, and no process may replace it."""
    mode = stat.S_IMODE(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)
    if mode & needed != needed:
        with suppress(PermissionError):  # another user's: only root reads it, and needs no permission
            os.chmod(name, mode | needed, dir_fd=here)


def _member(name: str, state: os.stat_result) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = stat.S_IMODE(state.st_mode), int(state.st_mtime)
    member.type = tarfile.DIRTYPE if stat.S_ISDIR(state.st_mode) else tarfile.REGTYPE
    return member


def _is_directory(name: str, here: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)


def _copy_out(name: str, here: int, target: Path, limit: int) -> int:
    """Copy a file out and return its bytes. Counts while copying: a file may have holes or grow."""
    copied = 0
    with os.fdopen(os.open(name, _FILE, dir_fd=here), "rb") as source, target.open("wb") as copy:
        while chunk := source.read(_CHUNK):
            copied += len(chunk)
            if copied > limit:
                raise OSError(errno.EFBIG, "it holds more than may be copied out")
            copy.write(chunk)
        mode = os.fstat(source.fileno()).st_mode
    target.chmod(stat.S_IMODE(mode) & 0o777)
    return copied


def _link(content: Path, place: SandboxPath) -> None:
    parent = _create(place.base, place.parts[:-1], place.owner)
    try:
        remove_below(parent, place.parts[-1])
        os.symlink(content, place.parts[-1], dir_fd=parent)
        if place.owner is not None:
            os.chown(place.parts[-1], place.owner, place.owner, dir_fd=parent, follow_symlinks=False)
    finally:
        os.close(parent)


def _open(base: Path, parts: Sequence[str]) -> int:
    """Open the directory at a path."""
    return _descend(base, parts, _enter)


def _create(base: Path, parts: Sequence[str], owner: int | None) -> int:
    """Open the directory at a path, and create it in place of whatever stands there."""
    return _descend(base, parts, lambda name, here: _make(name, here, owner))


def _descend(base: Path, parts: Sequence[str], enter: Callable[[str, int], int]) -> int:
    """Open one directory after the other by `enter` (a name, the open directory above it); return the last."""
    here = os.open(base, _DIRECTORY)
    for name in parts:
        try:
            below = enter(name, here)
        finally:
            os.close(here)
        here = below
    return here


def _make(name: str, here: int, owner: int | None) -> int:
    try:
        return _enter(name, here)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=here)  # the sandbox took away our permission
        return _enter(name, here)
    except OSError:
        remove_below(here, name)
        os.mkdir(name, 0o755, dir_fd=here)
        directory = _enter(name, here)
        _give(directory, owner)
        return directory


def _enter(name: str, here: int) -> int:
    return os.open(name, _DIRECTORY, dir_fd=here)


def _give(file: int, owner: int | None) -> None:
    if owner is not None:
        os.fchown(file, owner, owner)
