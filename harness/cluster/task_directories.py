"""Brings the directories that a task names to another machine: packs them once, unpacks them for each attempt.

They are unpacked below a directory that is named like a sandbox of the process, so that it is removed as one if the
process is killed. The task there names the copies. Left out: owners and times of files.
"""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sandboxes.local.process import default_root, make_sandbox_directory

DATA = ("metadata", "args", "returns")
"""Fields of a task that hold the user's own data, in which a name means nothing."""


def with_directories(task: Any, to: Callable[[str], str]) -> Any:
    """Replace by `to` each directory of this machine that a task (as builtins) names."""
    if isinstance(task, list):
        return [with_directories(one, to) for one in task]
    if not isinstance(task, dict):
        return task
    replaced = {}
    for name, value in task.items():
        if name == "directories" and isinstance(value, dict):
            replaced[name] = {path: to(source) for path, source in value.items()}
        elif name == "image" and isinstance(value, dict) and value.get("directory"):
            replaced[name] = value | {"directory": to(value["directory"])}
        else:
            replaced[name] = value if name in DATA else with_directories(value, to)
    return replaced


def directories_of(task: Any) -> list[str]:
    """List the directories of this machine that a task names, as absolute paths."""
    directories: set[str] = set()

    def collect(source: str) -> str:
        directories.add(source)
        return source

    with_directories(task, collect)
    return sorted(directories)


def pack_directories(directories: list[str]) -> bytes:
    """Pack directories into one archive."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for directory in directories:
            archive.add(directory, arcname=directory.lstrip("/"), filter=_anonymous)
    return file.getvalue()


def unpack_directories(parcel: bytes, place: Path) -> None:
    """Unpack an archive below `place`, each path as it was."""
    with tarfile.open(fileobj=io.BytesIO(parcel)) as archive:
        archive.extractall(place, filter="fully_trusted")  # packed by us


def make_place() -> Path:
    """Make a directory that gc removes like a sandbox when this process is dead."""
    return make_sandbox_directory(default_root())


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry
