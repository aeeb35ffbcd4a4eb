"""Compares what lies at a place in the agent's sandbox with the same place in a fresh one, and plans what to write."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from harness.environment.archive import Entry, Unpacked, unpack
from harness.environment.protected_files import matches
from harness.tasks import Task
from harness.tasks.schema import Artifact
from harness.verdict.carried.git import harmless, obeyed, repositories
from harness.verdict.carried.steering import Steering
from harness.verdict.findings import IsolationFindings

CONFIG_BYTES = 1 << 18
"""Longest configuration that is looked at; of a longer one nothing travels."""


@dataclass(frozen=True)
class Place:
    """One artifact and where it lies."""

    artifact: Artifact
    root: str
    """Its absolute path in the agent's sandbox."""
    below: str | None
    """Its path below the working directory; empty for that itself, None for a place elsewhere."""
    work: str | None = None
    """The working directory's path below it, for a place above that."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison needs."""

    task: Task
    place: Place
    modules: Callable[[], Collection[str]]
    """Asks the fresh sandbox for the Python modules that its image has installed; only where it matters."""
    staging: Path
    """Where the agent's files are unpacked; in the end it holds only what is to be written."""
    limit: int
    """Bytes of all files together."""
    initial: Mapping[str, Entry] | None = None
    """What lay there before the agent, where only its changes travel; None: everything does."""
    varied: Mapping[str, Entry | None] = field(default_factory=dict)
    """What variations of the environment had changed there: path -> what has lain there since; None: nothing."""


@dataclass
class Plan:
    """What is to be done in the fresh sandbox so that a place holds the agent's data."""

    clear: list[str] = field(default_factory=list)
    """Paths below the place that are removed first, topmost only; empty text: the place itself."""
    write: bool = False
    """Whether there is anything to write."""
    executable: bool = False
    """Whether a place that is one file can be executed."""


def compare(given: Comparison, theirs: IO[bytes] | None, ours: IO[bytes] | None, findings: IsolationFindings) -> Plan:
    """Unpack the archive of the agent's sandbox, set apart what is no data, and plan the rest.

    `theirs`, `ours`: the place in the agent's sandbox and in the fresh one, as archives; None: nothing lies there. What
    the agent did is added to `findings`. TooMuch when there is more than may be carried.
    """
    root = given.place.root
    for archive in (theirs, ours):
        if archive is not None:
            archive.seek(0)
    before = Unpacked() if ours is None else unpack(ours, None, root, {}, 2 * given.limit)
    known = before.entries | {path: entry for path, entry in given.varied.items() if entry is not None}
    now = Unpacked() if theirs is None else unpack(theirs, given.staging, root, known, given.limit)
    _undo_variations(given, before.entries, now.entries)
    dropped = _drop_links(given, before.entries, now.entries)
    findings.left_out.extend(f"{root}/{path}" for path in (*now.left_out, *dropped))
    _note_difference(root, before.entries, now.entries, findings)
    apart = _set_apart(given, before.entries, now.entries)
    for path in apart:
        fate = findings.restored if path in before.entries else findings.removed
        fate.append(f"{root}/{path}".rstrip("/"))
    _disarm(given, before.entries, now.entries, findings)
    excluded = _excluded(given, {*before.entries, *now.entries})
    kept = _Kept({*apart, *excluded}, _untouched(given.initial, before.entries, now.entries), before.entries)
    return _planned(given, before.entries, now.entries, kept)


def _undo_variations(given: Comparison, before: Mapping[str, Entry], now: dict[str, Entry]) -> None:
    """Undo variations of the environment that the agent has left alone: there `now` gets what the fresh sandbox has."""
    for path in sorted(given.varied, reverse=True):  # what lies in a directory comes before it
        entry, file = given.varied[path], given.staging / path
        if now.get(path) != entry:
            continue
        if entry is not None and entry.kind != "directory":
            file.unlink()
        elif entry is not None and before.get(path) != entry:
            with suppress(OSError):
                file.rmdir()
            if file.exists():  # it holds something of the agent's
                continue
        if path in before:
            now[path] = before[path]
        else:
            now.pop(path, None)


def _drop_links(given: Comparison, before: Mapping[str, Entry], now: dict[str, Entry]) -> list[str]:
    """Drop links of the agent's that lead to nothing, or to where the verifier's files will lie.

    Such a file may hold the right answer, and the link would show it to what reads the agent's work.
    """
    staging = Path(os.path.realpath(given.staging))
    theirs = [staging / path for path in _places_of_verifier(given)]
    dropped = []
    for path, entry in now.items():
        if entry.kind == "link" and entry != before.get(path):
            # The kernel says first whether it leads to anything: no for a circle, a chain of links that is too long or
            # a name that is too long, on which realpath or Path.exists would raise.
            leads = os.path.exists(staging / path)
            end = Path(os.path.realpath(staging / path)) if leads else staging
            if not leads or any(end == place or end in place.parents or place in end.parents for place in theirs):
                dropped.append(path)
    for path in dropped:
        (given.staging / path).unlink()
        del now[path]
    return dropped


def _places_of_verifier(given: Comparison) -> list[PurePosixPath]:
    """The paths below the place, relative to it, where the verifier's files and directories will lie."""
    root, below = PurePosixPath(given.place.root), given.place.below
    work = None if given.place.work is None else root / given.place.work
    if below is not None:
        work = PurePosixPath(*root.parts[: len(root.parts) - len(PurePosixPath(below).parts)])
    paths = [path for path in (*given.task.verifier.files, *given.task.verifier.directories) if path[:2] != "~/"]
    full = [(work or root.parent) / path for path in paths if work or path.startswith("/")]
    return [path.relative_to(root) for path in full if path.is_relative_to(root)]


def _note_difference(
    root: str, before: Mapping[str, Entry], now: Mapping[str, Entry], findings: IsolationFindings
) -> None:
    difference = findings.difference
    difference.added.extend(f"{root}/{path}" for path in now if path not in before)
    difference.removed.extend(f"{root}/{path}" for path in before if path not in now)
    difference.changed.extend(f"{root}/{path}" for path in now if path in before and now[path] != before[path])


def _set_apart(given: Comparison, before: Mapping[str, Entry], now: Mapping[str, Entry]) -> list[str]:
    """The topmost paths whose state from before the agent counts: they would be obeyed, by a verifier or by git."""
    changed = (path for path in obeyed(now) if now[path] != before.get(path))
    return [path for path in changed if now[path] != Entry("directory")] + _steering(given, before, now)


def _steering(given: Comparison, before: Mapping[str, Entry], now: Mapping[str, Entry]) -> list[str]:
    """The paths that would steer the verifier, where the place holds the working directory or lies in it."""
    if given.place.below is None and given.place.work is None:
        return []
    above = "" if given.place.work is None else f"{given.place.work}/"

    def read(path: str) -> bytes | None:
        file = given.staging / above / path
        return file.read_bytes() if file.stat().st_size <= CONFIG_BYTES else None

    inside = [
        {path.removeprefix(above): entry for path, entry in one.items() if path.startswith(above)}
        for one in (before, now)
    ]
    steering = Steering(given.task, given.place.below or "", inside[0], inside[1], given.modules)
    return [above + path for path in steering.paths(read)]


def _disarm(given: Comparison, before: Mapping[str, Entry], now: dict[str, Entry], findings: IsolationFindings) -> None:
    """Rewrite the configurations of git repositories that the agent made or changed."""
    for repository in repositories(now):
        path = f"{repository}config"
        if path not in now or now[path] == before.get(path) or now[path].kind == "directory":
            continue
        file = given.staging / path
        if now[path].kind == "link" or file.stat().st_size > CONFIG_BYTES:
            file.unlink()
            text, safe = "", "\n"
        else:
            text = file.read_text(errors="replace")
            safe = harmless(text)
        if text.split() != safe.split():
            findings.restored.append(f"{given.place.root}/{path}")
            file.write_text(safe)
            now[path] = Entry("file", "made harmless")


def _excluded(given: Comparison, paths: Collection[str]) -> set[str]:
    patterns, root = given.place.artifact.exclude, given.place.root
    return {path for path in paths if path and any(matches(f"{root}/{path}", pattern) for pattern in patterns)}


def _untouched(initial: Mapping[str, Entry] | None, before: Mapping[str, Entry], now: Mapping[str, Entry]) -> set[str]:
    """The paths that the agent left as it found them, where only its changes travel."""
    if initial is None:
        return set()
    same = {path for path, entry in now.items() if entry == initial.get(path) and entry.kind != "directory"}
    return same | {path for path in before if path not in now and path not in initial}


class _Kept:
    """Tells which paths of the fresh sandbox stay as they are: some with all that lies below, some by themselves."""

    def __init__(self, tops: Collection[str], alone: Collection[str], before: Collection[str]):
        self.tops, self._alone = set(tops), alone
        existing = [path for path in tops if path in before]
        self.above = {str(up) for path in existing for up in PurePosixPath(path).parents} - {"."}
        """Directories that hold some of them, so they stay too."""

    def __contains__(self, path: str) -> bool:
        return path in self._alone or path in self.tops or any(str(up) in self.tops for up in _above(path))


def _above(path: str) -> list[str]:
    return [str(up) for up in PurePosixPath(path).parents if str(up) != "."] if path else []


def _planned(given: Comparison, before: Mapping[str, Entry], now: Mapping[str, Entry], kept: _Kept) -> Plan:
    """Take out of the staging directory what need not be written, and list what must be removed."""
    plan = Plan(executable=now[""].executable if "" in now else False)
    for path, entry in now.items():
        file = given.staging / path
        if path in kept or entry == before.get(path) or (path in kept.above and entry.kind != "directory"):
            if entry.kind != "directory":
                file.unlink(missing_ok=True)  # one that a variation had removed was not packed
        else:
            plan.write = True
    for path in kept.tops:
        if now.get(path) == Entry("directory") and (given.staging / path).is_dir():
            shutil.rmtree(given.staging / path)
    cleared: set[str] = set()
    for path in sorted(before):
        if path in kept or path in kept.above or now.get(path) == before[path] or cleared.intersection(_above(path)):
            continue
        cleared.add(path)
    plan.clear = sorted(cleared)
    return plan
