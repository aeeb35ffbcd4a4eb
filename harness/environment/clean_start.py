"""Removes or reports what the image's build and the set-up left behind, before the agent sees it.

temporary   regular files below the directories for temporary files
caches      package managers' caches: pip, npm, yarn, uv, cargo, apt archives
histories   history files of shells, REPLs, pagers and editors: .bash_history, .python_history, .viminfo, *.swp
remains     leftovers of test runs: .pytest_cache, .tox, .coverage, compiled tests in __pycache__
tests       directories of tests and solutions: /tests, /solution, /oracle, /logs/verifier
vcs         commits beyond a repository's HEAD: other branches, stashes, reflogs, lost commits; only reported

A task can change the action for a kind (`clean.vcs = "remove"`) and keep single paths (`clean.keep`). Files that it
wrote itself with `files` stay. Paths that cannot be removed, as on a read-only root, are reported. Left out: sockets,
FIFOs and directories of temporary files (daemons use them), and contents, such as an answer in a comment.
"""

import os
import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import msgspec

from harness.environment.file_manifest import FileManifest, remove
from harness.environment.git_settings import git_variables
from harness.tasks import Task
from sandboxes.base import Limits, Sandbox, SandboxError

SECONDS = 120.0
"""Limit of the look at repositories."""
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
"""Patterns of the kinds. A match ends with the topmost path of the leftover."""
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
    """A file, directory or repository state that was left behind."""

    kind: str
    path: str
    """Its topmost path; for `vcs` a sentence."""
    removed: bool
    """Whether it was removed; in a plan, whether it is to be."""


def leftovers(
    manifest: FileManifest, task: Task, temporary: Collection[str], own: Collection[str] = ()
) -> list[Leftover]:
    """Plan what becomes of the leftovers in a manifest, topmost paths only. `own`: absolute paths of the task's files.

    A leftover with a path in it that is kept stays whole, and is reported.
    """

    def is_kept(path: str) -> bool:
        return path in own or any(_matches(path, pattern) for pattern in task.clean.keep)

    kinds: dict[str, str] = {}
    for path, stat in manifest.files.items():
        kind, top = _kind(path, stat, temporary)
        if kind and not is_kept(path):
            kinds.setdefault(top, kind)
    spared = [path for path in manifest.files if is_kept(path)]
    actions = msgspec.structs.asdict(task.clean)
    rows = []
    for top in sorted(top for top in kinds if not any(str(above) in kinds for above in PurePosixPath(top).parents)):
        action = actions[kinds[top]]
        if action != "keep":
            whole = not any(path.startswith(f"{top}/") for path in spared)
            rows.append(Leftover(kinds[top], top, action == "remove" and whole))
    return rows


def _kind(path: str, stat: str, temporary: Collection[str]) -> tuple[str, str]:
    """The kind of a path and the topmost path of its leftover; two empty texts when it belongs to none."""
    if match := KINDS.search(path):
        kind = match.lastgroup or ""
        return {"archives": "caches"}.get(kind, kind), path[: match.end()]
    regular = stat[0] in "f8"  # find's letter, or stat's mode in hex
    if regular and any(path.startswith(f"{directory}/") for directory in temporary):
        return "temporary", path
    return "", ""


def _matches(path: str, pattern: str) -> bool:
    """Whether a pattern names a path or a directory above it: from the root when it is absolute, else from its end."""
    pattern = pattern.removeprefix("~/").rstrip("/")
    full = pattern if pattern.startswith("/") else f"*/{pattern}"
    return fnmatchcase(path, full) or fnmatchcase(path, f"{full}/*")


async def clean_start(sandbox: Sandbox, task: Task, manifest: FileManifest) -> tuple[FileManifest, list[Leftover]]:
    """Remove the leftovers that the task does not keep. Returns the manifest after that, and all leftovers."""
    # by their whole paths: another file may end like one of them, as /tests/run.sh does like run.sh
    own = {_absolute(path, sandbox) for path in task.files}
    planned = leftovers(manifest, task, manifest.temporary, own)
    stayed = await remove(sandbox, [row.path for row in planned if row.removed], manifest.path)
    rows = [Leftover(row.kind, row.path, row.removed and row.path not in stayed) for row in planned]
    rows += await _vcs(sandbox, task, manifest)
    return manifest.without([row.path for row in rows if row.removed]), rows


def _absolute(path: str, sandbox: Sandbox) -> str:
    """The path of a task's file in a sandbox, where it may begin with ~/ or be relative to the working directory."""
    path = path.replace("~", sandbox.home, 1) if path.startswith("~/") else path
    return os.path.normpath(os.path.join(sandbox.work, path))


async def _vcs(sandbox: Sandbox, task: Task, manifest: FileManifest) -> list[Leftover]:
    if task.clean.vcs == "keep" or not any(path.endswith("/.git") for path in manifest.files):
        return []
    command = f"action={task.clean.vcs}\nset -- {shlex.quote(sandbox.work)} {shlex.quote(sandbox.home)}\n{_VCS}"
    # Before a later step, the agent of the step before may have configured the repository.
    result = await sandbox.run(command, Limits(seconds=SECONDS), git_variables())
    if result.ended != "exit" and task.clean.vcs == "remove":  # else the agent would see later commits
        raise SandboxError(
            f"the history of the repository in {sandbox.work} was not removed: ended by its {result.ended} limit; set "
            "clean.vcs to report or keep, or take it out of the image"
        )
    lines = result.output.splitlines()
    removed = {line.removesuffix(": removed") for line in lines if line.endswith(": removed")}
    rows = [Leftover("vcs", line, line.split(": ")[0] in removed) for line in lines if " commits beyond HEAD " in line]
    if result.ended != "exit":
        rows.append(Leftover("vcs", f"not all repositories were examined within {SECONDS:g} s", False))
    if result.cut:
        rows.append(Leftover("vcs", "the end of what the examination of repositories said was lost", False))
    return rows
