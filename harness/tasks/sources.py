"""Loads tasks from JSONL files, Harbor task directories, directories of these, globs, and mix files with weights.

A mix file is TOML: `[[source]]` with `path` (relative to the file) and optionally `weight` and `limit`, and `[domains]`
with a weight for each; `revisit` skips tasks by their success. Left out: data sets that would have to be downloaded.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from harness.tasks.harbor import is_task, load_harbor
from harness.tasks.harbor_toml import Refused
from harness.tasks.jsonl import load_tasks
from harness.tasks.mix import TaskMix, TaskSource
from harness.tasks.schema import Count, Domain, Share, Strict, Task, Text
from proxy.pool.errors import UserError
from proxy.pool.settings_file import load_settings
from sandboxes.host_files.walk import DEPTH, ENTRIES, leads_inside


class MixSource(Strict, frozen=True, kw_only=True):
    """One [[source]] of a mix file."""

    path: Text
    """JSONL file, directory or glob, relative to the mix file."""
    weight: Share | None = None
    """How often its tasks come, relative to the other sources' weights. Either all sources have one or none."""
    limit: Count | None = None
    """Use only this many tasks, from the first on."""


class MixFile(Strict, frozen=True, kw_only=True):
    """A mix file."""

    source: Annotated[list[MixSource], msgspec.Meta(min_length=1)]
    domains: dict[Domain, float] = {}
    """Domain -> how often its tasks come, relative to the other domains."""
    revisit: Annotated[float, msgspec.Meta(ge=0.001, le=1)] | None = None
    """Skip tasks that are always or never solved, but for this share of their turns. Default: none is skipped."""


@dataclass
class LoadedTasks:
    """The tasks of all sources, and the reasons for those that were left out."""

    mix: TaskMix
    refused: list[str] = field(default_factory=list)
    """One sentence for each task that needs something which is not offered here."""


def load_sources(sources: Sequence[str]) -> LoadedTasks:
    """Load every task of the sources. UserError for the first fault, and when no task is left to run."""
    refused: list[str] = []
    if not sources:
        raise UserError("the list of tasks is empty; name a JSONL file or directories with a task.toml")
    if len(sources) == 1 and sources[0].endswith(".toml"):
        mix = _mix(Path(sources[0]), refused)
    else:
        mix = TaskMix([TaskSource(path, _tasks(path, Path(), refused)) for path in sources])
    if not mix.tasks:
        raise UserError(f"no task can run: all {len(refused)} were left out, the first because {refused[0]}")
    _names(mix)
    return LoadedTasks(mix.check(), refused)


def _mix(path: Path, refused: list[str]) -> TaskMix:
    file = load_settings(path, MixFile)
    sources = []
    for entry in file.source:
        tasks = _tasks(entry.path, path.parent, refused)[: entry.limit]
        sources.append(TaskSource(entry.path, tasks, entry.weight))
    domains: dict[str, float] = {domain: weight for domain, weight in file.domains.items()}
    return TaskMix([source for source in sources if source.tasks], domains, file.revisit)


def _tasks(given: str, base: Path, refused: list[str]) -> list[Task]:
    """Load the tasks of one source; reasons for refused ones are added to `refused`."""
    tasks = [task for path in _paths(given, base) for task in _of_path(path, given, refused)]
    if not tasks and not refused:
        raise UserError(f"{given} holds no task; name a JSONL file or directories with a task.toml")
    return tasks


def _paths(given: str, base: Path) -> list[Path]:
    try:
        if (base / given).exists():
            return [base / given]
    except OSError as error:
        raise UserError(f"{given} cannot be a source ({error.strerror}); name a path that exists") from error
    if not any(sign in given for sign in "*?["):
        raise UserError(f"{given} does not exist; name a JSONL file, a task directory, a directory of them or a glob")
    return sorted(_matches(base / given, given))


def _matches(pattern: Path, given: str) -> set[Path]:
    """The paths that a pattern matches.

    Unlike Python's glob, which follows links in a circle again and again, this follows a link only where the pattern
    names it, or at its end.
    """
    names = pattern.parts[bool(pattern.anchor) :]
    places = {Path(pattern.anchor)}
    for index, name in enumerate(names):
        if name == "**":
            places = set(islice((below for place in places for below in _below(place)), ENTRIES + 1))
        elif any(sign in name for sign in "*?["):
            last, hidden = index == len(names) - 1, name.startswith(".")
            places = {
                child
                for place in places
                for child in _children(place)
                if fnmatchcase(child.name, name)
                and (last or not child.is_symlink())
                and (hidden or not child.name.startswith("."))
            }
        else:
            places = {place / name for place in places if os.path.lexists(place / name)}
        if len(places) > ENTRIES:
            raise UserError(f"{given} matches more than {ENTRIES} paths; name fewer")
    return places


def _below(place: Path) -> Iterator[Path]:
    """A directory and all below it, without hidden ones and links."""
    left = [place]
    while left:
        yield (place := left.pop())
        left += [c for c in _children(place) if os.path.isdir(c) and not c.is_symlink() and not c.name.startswith(".")]


def _children(place: Path) -> list[Path]:
    try:
        return list(islice(place.iterdir(), ENTRIES + 1))
    except OSError:  # no directory, or one that cannot be read
        return []


def _of_path(path: Path, given: str, refused: list[str]) -> Iterator[Task]:
    if path.is_dir():
        for directory in _directories(path):
            try:
                yield load_harbor(directory)
            except Refused as error:
                refused.append(str(error))
    elif path.suffix == ".toml":
        raise UserError(
            f"{path} is a mix file, and mixes do not nest: name it alone, not in {given!r} or beside others"
        )
    else:
        yield from load_tasks(path)


def _directories(root: Path) -> Iterator[Path]:
    """The task directories at and below a path. Directories inside a task directory belong to that task.

    A link to another directory is followed, once, if it stays below the path.
    """
    left, seen = [(root, 0)], set[Path]()
    while left:
        place, depth = left.pop()
        if (real := place.resolve()) in seen:
            continue
        seen.add(real)
        if len(seen) > ENTRIES or depth > DEPTH:
            raise UserError(f"{root} holds too many directories; name those that hold tasks")
        if is_task(place):
            yield place
            continue
        for child in sorted(place.iterdir(), reverse=True):
            # Not child.is_dir(), which raises an error for a link to a name that is too long.
            if os.path.isdir(child) and not child.name.startswith("."):
                if not leads_inside(root, child):
                    raise UserError(f"{child} is a link that leads out of {root}; name what it leads to as a source")
                left.append((child, depth + 1))


def _names(mix: TaskMix) -> None:
    known: dict[str, str] = {}
    for source in mix.sources:
        for task in source.tasks:
            if task.id in known:
                raise UserError(f"id {task.id!r} is used in {known[task.id]} and in {source.name}; rename one of them")
            known[task.id] = source.name
