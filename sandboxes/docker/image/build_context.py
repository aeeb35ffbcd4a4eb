"""Build contexts: selects the files of a directory that go to the daemon, hashes them, and packs an archive of them."""

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sandboxes.docker.image.ignore_rules import FILE_BYTES, IgnoreRules
from sandboxes.host_files.walk import TreeError, check_entry, leads_inside, walk

IGNORE = ".dockerignore"
DOCKERFILE_BYTES = 1 << 20


def files(context: Path, dockerfile: str) -> Iterator[tuple[str, Path]]:
    """Yield the name in the context and the path of everything that is not ignored, in a fixed order.

    OSError when some of it cannot be read; TreeError when some of it must not be sent (sandboxes/host_files/walk.py).
    """
    check_dockerfile(context / dockerfile)
    rules = _rules(context)

    def unread(error: OSError, inside: str) -> None:
        if not inside or not rules.ignore(inside):
            raise error

    for entry in walk(context, unread):
        if entry.inside in (dockerfile, IGNORE) or not rules.ignore(entry.inside):
            check_entry(context, entry)
            yield entry.inside, entry.path


def check_dockerfile(path: Path) -> None:
    """TreeError for one that is too large to be read. There need not be one."""
    if path.is_file() and path.stat().st_size > DOCKERFILE_BYTES:
        raise TreeError(
            f"{path} has more than {DOCKERFILE_BYTES >> 20} MiB, too much to be searched for what a build must not "
            "reach; put its data into files beside it and copy them"
        )


def read_dockerfile(path: Path) -> str:
    """Return its text as it is: to Docker a lone \\r ends no line. TreeError for one that is too large."""
    check_dockerfile(path)
    with path.open("rb") as file:
        return file.read(DOCKERFILE_BYTES).decode(errors="replace")


def digest(context: Path, dockerfile: str) -> str:
    """Return the SHA-256 of what would be sent: names, kinds, modes and content."""
    whole = hashlib.sha256(dockerfile.encode())
    for inside, path in files(context, dockerfile):
        state = path.lstat()
        whole.update(os.fsencode(f"\0{inside}\0{stat.S_IFMT(state.st_mode)}\0{state.st_mode & 0o111}\0"))
        if path.is_symlink():
            whole.update(os.fsencode(os.readlink(path)))
        elif path.is_file():
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()


def pack(context: Path, dockerfile: str, instead: str, archive: IO[bytes]) -> str:
    """Write the archive that the daemon builds from, and return the Dockerfile's name in it.

    Where the directory has no Dockerfile, `instead` is its content, and the files are below `files/`.
    """
    folder = "" if (context / dockerfile).is_file() else "files/"
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for inside, path in files(context, dockerfile):
            tar.add(path, folder + inside, recursive=False, filter=_of_root)
        if folder:
            dockerfile = "Dockerfile"
            member = tarfile.TarInfo(dockerfile)
            member.size = len(instead.encode())
            tar.addfile(member, io.BytesIO(instead.encode()))
    archive.seek(0)
    return dockerfile


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _rules(context: Path) -> IgnoreRules:
    """The rules of the context's .dockerignore; none where there is no such file."""
    path = context / IGNORE
    if not path.is_file():
        return IgnoreRules("", "")
    if not leads_inside(context, path) or path.stat().st_size > FILE_BYTES:
        raise TreeError(f"{path} leads out of {context} or has more than {FILE_BYTES} bytes; replace it")
    return IgnoreRules(path.read_text(errors="replace"), str(path))
