"""Build contexts: selects the files of a directory that go to the daemon, hashes them, and packs them into an archive.

The patterns of a .dockerignore are read by Docker's SDK: from the root, `*` within a name, `**` across names, `[a-z]`,
`!` for exceptions; the last one that matches decides.
"""

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from docker.utils.build import Pattern

IGNORE = ".dockerignore"


def files(context: Path, dockerfile: str) -> Iterator[tuple[str, Path]]:
    """Yield the name in the context and the path of everything that is not ignored, in a fixed order.

    OSError when some of it cannot be read.
    """
    rules = _rules(context / IGNORE)

    def unread(error: OSError) -> None:
        at = Path(error.filename)
        if at == context or not _ignored(at.relative_to(context).as_posix(), rules):
            raise error

    for directory, names, plain in os.walk(context, onerror=unread):
        names.sort()
        for name in sorted([*names, *plain]):
            path = Path(directory, name)
            inside = path.relative_to(context).as_posix()
            if inside in (dockerfile, IGNORE) or not _ignored(inside, rules):
                yield inside, path


def digest(context: Path, dockerfile: str) -> str:
    """Return the SHA-256 of what would be sent: names, kinds, modes and content."""
    whole = hashlib.sha256(dockerfile.encode())
    for inside, path in files(context, dockerfile):
        state = path.lstat()
        whole.update(f"\0{inside}\0{stat.S_IFMT(state.st_mode)}\0{state.st_mode & 0o111}\0".encode())
        if path.is_symlink():
            whole.update(os.readlink(path).encode())
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


def _rules(path: Path) -> list["Pattern"]:
    """Return the patterns of a .dockerignore; none where there is no such file."""
    if not path.is_file():
        return []
    from docker.utils.build import Pattern  # imported here: the SDK takes up to a second

    lines = map(str.strip, path.read_text().splitlines())
    return [Pattern(line) for line in lines if line and not line.startswith("#")]


def _ignored(inside: str, rules: "list[Pattern]") -> bool:
    """Return whether the last pattern that matches the path, or a directory above it, leaves it out.

    The SDK's own PatternMatcher differs from Docker here: it ignores the case of letters, and it applies neither
    `**/name` nor an exception such as `!**/name` below a directory that is left out.
    """
    if not rules:
        return False
    from docker.utils.fnmatch import fnmatchcase

    ignored = False
    paths = [inside, *map(str, list(PurePosixPath(inside).parents)[:-1])]
    for pattern in rules:
        if any(fnmatchcase(path, pattern.cleaned_pattern) for path in paths):
            ignored = not pattern.exclusion
    return ignored
