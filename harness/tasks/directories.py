"""Directories of this machine that tasks name: whether they may enter a sandbox, and a digest of their content.

Everything is checked when the task is loaded, before an image is built or a file is copied. Left out: directories that
change between the two.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.tasks.schema import TaskImage
from proxy.pool.errors import UserError
from sandboxes.docker.image.build_context import check_dockerfile, files
from sandboxes.host_files.walk import TreeError, check_entry, walk

CHUNK = 1 << 20


def check_directory(directory: Path) -> None:
    """UserError for a link that leads out, a special file, a tree that is too large, and what cannot be read."""
    with _in_one_sentence():
        for entry in walk(directory):
            check_entry(directory, entry)


def check_context(directory: Path, dockerfile: str) -> None:
    """The same for a directory that an image is built from, without what its .dockerignore names."""
    with _in_one_sentence():
        for _ in files(directory, dockerfile):
            pass


def check_dockerfiles(images: Iterable[TaskImage]) -> None:
    """UserError for a Dockerfile that is too large. The images come from directories."""
    with _in_one_sentence():
        for image in images:
            check_dockerfile(Path(image.directory) / image.dockerfile)


def digest_of(directories: Iterable[Path]) -> str:
    """Digest of the names, modes and contents of all files in these directories."""
    digest = hashlib.sha256()
    with _in_one_sentence():
        for directory in directories:
            for entry in walk(directory):
                mode = entry.status.st_mode
                target = os.readlink(entry.path) if stat.S_ISLNK(mode) else ""
                length = entry.status.st_size if stat.S_ISREG(mode) else len(target.encode(errors="surrogateescape"))
                digest.update(os.fsencode(f"{entry.inside}\0{mode:o}\0{length}\0{target}"))
                for chunk in _chunks(entry.path) if stat.S_ISREG(mode) else ():
                    digest.update(chunk)
    return digest.hexdigest()[:16]


def is_directory(path: str) -> bool:
    """Whether there is such a directory. False for a path that no system takes, too."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    try:
        yield
    except TreeError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); make it readable or remove it") from error
