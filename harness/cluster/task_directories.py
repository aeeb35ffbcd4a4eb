"""Directories that a task names, brought to another machine: packed once here, unpacked there for each attempt.

There they lie below a directory that is named like a sandbox of its process, so that they are removed as one when the
process is killed. The task that works there names the copies. Left out: owners and times of files.
"""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandboxes.local.process import default_root, make_sandbox_directory


def moved(task: Any, to: Callable[[str], str]) -> Any:
    """A task as builtins, with each directory of this machine that it names replaced."""
    if isinstance(task, list):
        return [moved(one, to) for one in task]
    if not isinstance(task, dict):
        return task
    made = {}
    for name, value in task.items():
        if name == "directories" and isinstance(value, dict):
            made[name] = {path: to(source) for path, source in value.items()}
        elif name == "image" and isinstance(value, dict) and value.get("directory"):
            made[name] = value | {"directory": to(value["directory"])}
        else:
            made[name] = value if name == "metadata" else moved(value, to)  # metadata is the user's own
    return made


def directories_of(task: Any) -> list[str]:
    """The directories of this machine that a task names, absolute."""
    found: set[str] = set()

    def seen(source: str) -> str:
        found.add(source)
        return source

    moved(task, seen)
    return sorted(found)


def packed(directories: list[str]) -> bytes:
    """All of them in one archive."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for directory in directories:
            archive.add(directory, arcname=directory.lstrip("/"), filter=_anonymous)
    return file.getvalue()


def unpacked(parcel: bytes, place: Path) -> None:
    """Lay out the archive's content: every path is that of before, below this place."""
    with tarfile.open(fileobj=io.BytesIO(parcel)) as archive:
        archive.extractall(place, filter="fully_trusted")  # packed by us


def own_place() -> Path:
    """A new directory that is removed as a sandbox of this process when the process is dead."""
    return make_sandbox_directory(default_root())


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry
