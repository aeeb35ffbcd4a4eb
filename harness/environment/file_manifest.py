"""Lists the files of a sandbox with their sizes and times, and compares two such lists.

One `find` in the sandbox covers its work directory, home, temporary files, the usual directories of tests and, where
the root is writable, everything. A file counts as changed when its kind, mode, owner, size, mtime or ctime differs; the
ctime cannot be set back from inside. Left out: contents, other mounts, and files beyond the bounds (`whole` is False
then). Files that are asked for by name come first, so that no number of other files can hide them. Where `find` has no
-printf (busybox), times are whole seconds, and a change within the second shows only if the size differs.
"""

import gzip
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from sandboxes.base import Limits, Sandbox, SandboxError, Spec

MAX_FILES = 200_000
MAX_BYTES = 48 << 20
SECONDS = 120.0
COMMAND_BYTES = 1 << 16
"""Length of a command line. Linux takes 128 KiB in one argument, and one more path has 16 KiB at most when quoted."""
FULL = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PLACES = ("/tests", "/solution", "/oracle", "/logs", "/var/tmp", "/root")
"""Also listed where the sandbox has its own root: an agent could find what images leave there."""
MOUNTED = (" /etc/hostname", " /etc/hosts", " /etc/resolv.conf")
"""Files that Docker's daemon rewrites at any time."""
_FIRST = "first"
# a directory's size and times change with what lies in it, which is listed itself
_SHOW = r"""
show() { find "$@" \( -type d -printf 'd %m %U - - - %p\0' -o -printf '%y %m %U %s %T@ %C@ %p\0' \) 2>/dev/null; }
find / -maxdepth 0 -printf '' 2>/dev/null ||
    show() { find "$@" -exec stat -c '%f %a %u %s %Y %Z %n' {} + 2>/dev/null | tr '\n' '\0'; }
printf '%s\0%s\0' "$PATH" "${TMPDIR:-/tmp}"
"""


@dataclass(frozen=True)
class FileDifference:
    """The difference between two manifests; paths are sorted."""

    added: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FileManifest:
    """The files of a sandbox at one moment."""

    files: dict[str, str]
    """Absolute path -> `kind mode owner size mtime ctime`; of a directory only the first three."""
    whole: bool
    """False when there were more files than the bounds allow, or the search was cut off."""
    path: str = FULL
    """$PATH as a command of the agent's user finds it."""
    temporary: tuple[str, ...] = ("/tmp", "/var/tmp")
    """Directories for temporary files."""

    def __sub__(self, before: "FileManifest") -> FileDifference:
        added = [path for path in self.files if path not in before.files]
        removed = [path for path in before.files if path not in self.files] if self.whole else []
        changed = [path for path, stat in self.files.items() if before.files.get(path, stat) != stat]
        return FileDifference(sorted(added), sorted(changed), sorted(removed))

    def without(self, removed: Collection[str]) -> "FileManifest":
        """The manifest without these paths and everything below them."""
        gone = set(removed)
        left = {path: stat for path, stat in self.files.items() if gone.isdisjoint(_upwards(path))}
        return replace(self, files=left)


def _upwards(path: str) -> Iterator[str]:
    """Yield a path and each directory above it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


async def take_manifest(
    sandbox: Sandbox, spec: Spec, own_root: bool, first: Iterable[str] = (), names: Iterable[str] = ()
) -> FileManifest:
    """List the files of a sandbox that its agent's user can see.

    `own_root`: the sandbox has its own root file system, not the machine's. Files directly in the directories `first`
    whose names match `names` are listed first and never cut off: SandboxError when these alone are beyond the bounds.
    """
    roots = [sandbox.work, sandbox.home, *(PLACES if own_root else ())]
    roots += ["/"] if own_root and spec.profile == "harbor" else []
    named = " -o ".join(f"-name {shlex.quote(pattern)}" for pattern in names)
    shallow = "".join(f"show {shlex.quote(directory)} -maxdepth 1 \\( {named} \\)\n" for directory in first)
    deep = f'show {" ".join(map(shlex.quote, roots))} "${{TMPDIR:-/tmp}}" -xdev\n'
    lines = _Lines()
    limits = Limits(seconds=SECONDS, output_bytes=1 << 10)
    command = f"{_SHOW}{shallow}printf '{_FIRST}\\0'\n{deep}printf 'end\\0'"
    result = await sandbox.run(command, limits, {}, on_output=lines.add)
    if result.cut:  # what is missing would pass for removed, or for the agent's own later
        raise SandboxError(f"the files of sandbox {sandbox.id} cannot be listed: the end of the list was lost")
    path, temporary, files = lines.read()
    if not lines.begun:
        raise SandboxError(f"the files of sandbox {sandbox.id} cannot be listed: {result.output[-300:].strip()!r}")
    everywhere = (temporary or "/tmp", *(("/tmp", "/var/tmp") if own_root else ()))
    return FileManifest(files, result.ended == "exit" and lines.ended, path or FULL, everywhere)


class _Lines:
    """The output of `find` as it comes, up to the bound."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self.begun = False
        """Whether the files that come first are complete."""
        self.ended = False

    def add(self, piece: bytes) -> None:
        self._kept += piece[: MAX_BYTES - len(self._kept)]

    def read(self) -> tuple[str, str, dict[str, str]]:
        """Parse the output into $PATH, $TMPDIR, and the manifest's files."""
        lines = bytes(self._kept).decode(errors="backslashreplace").split("\0")
        self.begun = _FIRST in lines[2:MAX_FILES]
        self.ended = lines[-2:] == ["end", ""] and len(lines) <= MAX_FILES
        path, temporary = (*lines[:2], "", "")[:2]
        files = {}
        for line in lines[2:MAX_FILES]:
            if line.count(" ") >= 6 and not line.endswith(MOUNTED):
                *stat, name = line.split(" ", 6)
                # without -printf the kind is the mode in hexadecimal: 4... is a directory's
                is_directory = stat[0] == "d" or (len(stat[0]) == 4 and stat[0].startswith("4"))
                files[name] = " ".join(["d", *stat[1:3]] if is_directory else stat)
        return path, temporary, files


async def remove(sandbox: Sandbox, paths: Sequence[str], path: str) -> set[str]:
    """Remove paths as the agent's user and return those that are still there. `path`: a trusted $PATH.

    SandboxError when that takes too long: what is left then is not known.
    """
    left: set[str] = set()
    for batch in in_commands(paths):
        # a link that leads nowhere does not exist for -e
        left_over = '[ ! -e "$p" ] && [ ! -L "$p" ] || printf "%s\\0" "$p"'
        command = f'for p in {batch}; do rm -rf -- "$p" 2>/dev/null; {left_over}; done'
        result = await sandbox.run(command, Limits(seconds=SECONDS), {"PATH": path})
        if result.ended != "exit":
            raise SandboxError(f"files of sandbox {sandbox.id} were not removed: ended by its {result.ended} limit")
        if result.cut:
            raise SandboxError(f"which files of sandbox {sandbox.id} were removed is not known: the answer was lost")
        left.update(result.output.split("\0")[:-1])
    return left


def in_commands(paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths, quoted for a shell, in pieces that each fit into a command."""
    batch: list[str] = []
    size = 0
    for path in map(shlex.quote, paths):
        batch.append(path)
        size += len(path.encode()) + 1
        if size >= COMMAND_BYTES:
            yield " ".join(batch)
            batch, size = [], 0
    if batch:
        yield " ".join(batch)


def write_manifest(file: Path, manifest: FileManifest) -> None:
    """Write a manifest as gzipped JSON: a long run writes thousands of them."""
    _write(file, {"whole": manifest.whole, "files": manifest.files})


def write_difference(file: Path, difference: FileDifference) -> None:
    _write(file, {"added": difference.added, "changed": difference.changed, "removed": difference.removed})


def _write(file: Path, content: dict[str, object]) -> None:
    file.write_bytes(gzip.compress(msgspec.json.encode(content), compresslevel=1, mtime=0))
