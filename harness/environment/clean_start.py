"""A clean start: what the image's build and the set-up left behind is removed or reported before the agent sees it.

temporary   regular files below the directories for temporary files
caches      package managers' caches: pip, npm, yarn, uv, cargo, apt archives
histories   what shells, REPLs, pagers and editors remember: .bash_history, .python_history, .viminfo, *.swp
remains     what test runs leave: .pytest_cache, .tox, .coverage, compiled tests in __pycache__
tests       the places of tests and solutions: /tests, /solution, /oracle, /logs/verifier
vcs         what a repository holds beyond its HEAD: other branches, stashes, reflogs, lost commits; only reported

A task changes what is done about a kind (`clean.vcs = "remove"`) and keeps single paths (`clean.keep`). What it wrote
itself with `files` stays. What cannot be removed, as on a read-only root, is reported. Left out: sockets, FIFOs and
directories of temporary files (daemons use them), and what only its meaning gives away, an answer in a comment, say.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import msgspec

from harness.environment.file_manifest import FileManifest, quoted, remove
from harness.tasks import Task
from sandboxes.base import Limits, Sandbox

SECONDS = 120.0
_CACHES = r"\.cache/(?:pip|uv|yarn|pnpm|go-build|pre-commit)|\.npm/_cacache|\.cargo/registry|\.yarn/cache"
_HISTORIES = r"\.\w+_history|\.histfile|\.zhistory|\.viminfo|\.lesshst|\.wget-hsts|[^/]+\.sw[op]|fish_history"
_REMAINS = (
    r"\.pytest_cache|\.tox|\.nox|\.hypothesis|htmlcov|\.coverage|__pycache__/(?:test_|conftest\.)[^/]*|junit[^/]*\.xml"
)
KINDS = re.compile(
    rf"^(?P<tests>/(?:tests|solution|oracle|logs/verifier))(?=/|$)"
    rf"|/(?P<caches>{_CACHES})(?=/|$)|^(?P<archives>/var/cache/apt/archives/[^/]+\.deb)$"
    rf"|/(?P<histories>{_HISTORIES})$|/(?P<remains>{_REMAINS})(?=/|$)"
)
"""Which paths are of which kind; the match ends with the topmost path of the thing."""
_VCS = r"""
find "$@" -xdev -name .git -prune 2>/dev/null | while IFS= read -r dir; do
    git --git-dir="$dir" rev-parse HEAD >/dev/null 2>&1 || continue
    count=$(git --git-dir="$dir" rev-list --all --reflog --count HEAD --not HEAD 2>/dev/null || echo 0)
    lost=$(git --git-dir="$dir" fsck --no-progress --unreachable --no-reflogs 2>/dev/null |
        grep -c '^unreachable commit')
    [ "$count" -gt 0 ] || [ "$lost" -gt 0 ] || continue
    echo "$dir: $count commits beyond HEAD on other branches, tags, stashes or reflogs, $lost unreachable"
    [ "$action" = remove ] || continue
    head=$(git --git-dir="$dir" symbolic-ref -q HEAD)
    git --git-dir="$dir" for-each-ref --no-merged HEAD --format='%(refname)' | while IFS= read -r ref; do
        [ "$ref" = "$head" ] || git --git-dir="$dir" update-ref -d "$ref"
    done
    rm -f "$dir/ORIG_HEAD" "$dir/FETCH_HEAD" "$dir/MERGE_HEAD"
    git --git-dir="$dir" reflog expire --expire=now --expire-unreachable=now --all
    git --git-dir="$dir" gc --quiet --prune=now && echo "$dir: removed"
done
"""


@dataclass(frozen=True)
class Leftover:
    """One thing that was there and need not have been."""

    kind: str
    path: str
    """The topmost path of it; of `vcs`, a sentence."""
    removed: bool


def leftovers(manifest: FileManifest, task: Task, temporary: Collection[str]) -> list[Leftover]:
    """What a task's rules find in a manifest: topmost paths only. `removed` says what is to be removed."""
    kept = {*task.files, *task.clean.keep}
    found: dict[str, str] = {}
    for path, stat in manifest.files.items():
        kind, top = _kind(path, stat, temporary)
        if kind and not any(_matches(path, pattern) for pattern in kept):
            found.setdefault(top, kind)
    spared = [path for path in manifest.files if any(_matches(path, pattern) for pattern in kept)]
    actions = msgspec.structs.asdict(task.clean)
    rows = []
    for top in sorted(top for top in found if not any(str(above) in found for above in PurePosixPath(top).parents)):
        action = actions[found[top]]
        if action != "keep":
            whole = not any(path.startswith(f"{top}/") for path in spared)
            rows.append(Leftover(found[top], top, action == "remove" and whole))
    return rows


def _kind(path: str, stat: str, temporary: Collection[str]) -> tuple[str, str]:
    """The kind of a path and the topmost path of what it belongs to; two empty texts when it is none."""
    if found := KINDS.search(path):
        kind = found.lastgroup or ""
        return {"archives": "caches"}.get(kind, kind), path[: found.end()]
    regular = stat[0] in "f8"  # find's letter, or stat's mode in hex
    if regular and any(path.startswith(f"{directory}/") for directory in temporary):
        return "temporary", path
    return "", ""


def _matches(path: str, pattern: str) -> bool:
    """A pattern names a path from its end, or from the root when it is absolute; what lies below it is meant, too."""
    pattern = pattern.removeprefix("~/").rstrip("/")
    full = pattern if pattern.startswith("/") else f"*/{pattern}"
    return fnmatchcase(path, full) or fnmatchcase(path, f"{full}/*")


async def clean_start(sandbox: Sandbox, task: Task, manifest: FileManifest) -> tuple[FileManifest, list[Leftover]]:
    """Remove what is to be removed; what is left is reported. The manifest is the one after it."""
    found = leftovers(manifest, task, manifest.temporary)
    doomed = [row.path for row in found if row.removed]
    stayed = await remove(sandbox, doomed, manifest.path)
    rows = [Leftover(row.kind, row.path, row.removed and row.path not in stayed) for row in found]
    rows += await _vcs(sandbox, task, manifest)
    return manifest.without([row.path for row in rows if row.removed]), rows


async def _vcs(sandbox: Sandbox, task: Task, manifest: FileManifest) -> list[Leftover]:
    if task.clean.vcs == "keep" or not any(path.endswith("/.git") for path in manifest.files):
        return []
    command = f"action={task.clean.vcs}\nset -- {quoted(sandbox.work)} {quoted(sandbox.home)}\n{_VCS}"
    trusted = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    result = await sandbox.run(command, Limits(seconds=SECONDS), trusted)
    lines = result.output.splitlines()
    removed = {line.removesuffix(": removed") for line in lines if line.endswith(": removed")}
    return [Leftover("vcs", line, line.split(": ")[0] in removed) for line in lines if " commits beyond HEAD " in line]
