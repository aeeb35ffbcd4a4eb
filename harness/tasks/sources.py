"""Loads tasks from JSONL files, Harbor task directories, directories of these, globs, and mix files with weights.

A mix file is TOML: `[[source]]` with `path` (relative to the file) and optionally `weight` and `limit`, and `[domains]`
with a weight for each. Left out: data sets that would have to be downloaded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from glob import iglob
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

MAX_WILDCARDS = 10


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
    domains: dict[Domain, Share] = {}
    """Domain -> how often its tasks come, relative to the other domains."""


@dataclass
class LoadedTasks:
    """The tasks of all sources, and the reasons for those that were left out."""

    mix: TaskMix
    refused: list[str] = field(default_factory=list)
    """For each task that needs something which is not offered here, one sentence."""


def load_sources(sources: Sequence[str]) -> LoadedTasks:
    """Load every task of the sources. UserError for the first fault, and when no task is left to run."""
    refused: list[str] = []
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
    return TaskMix([source for source in sources if source.tasks], domains)


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
    if given.count("*") > MAX_WILDCARDS or "**" in given.replace("**", "", 1):
        raise UserError(f"{given} has more than {MAX_WILDCARDS} wildcards or several **; name the directory above")
    try:
        matches = list(islice(_matches(given, base), ENTRIES + 1))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{given} cannot be searched ({error}); name the directory above") from error
    if len(matches) > ENTRIES:
        raise UserError(f"{given} matches more than {ENTRIES} paths; name fewer")
    return sorted(matches)


def _matches(given: str, base: Path) -> Iterator[Path]:
    if "**" not in given:
        yield from (base / match for match in iglob(given, root_dir=base))
        return
    whole = base / given
    anchor = Path(whole.anchor)
    for path in anchor.glob(str(whole.relative_to(anchor))):  # unlike the module glob it follows no links at **
        if not any(part.startswith(".") and part not in whole.parts for part in path.parts):
            yield path


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
            if child.is_dir() and not child.name.startswith("."):
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
