"""Loads tasks from a JSONL file: one JSON object per line, all of them checked before anything starts.

Paths of directories are relative to the file. A line cannot include tasks from other files.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from harness.tasks.check import check
from harness.tasks.schema import Directories, Solution, Step, Task, TaskImage, Verifier
from proxy.pool.errors import UserError
from proxy.pool.settings_file import checked


def load_tasks(path: Path) -> list[Task]:
    """Load every task of a file. UserError names the file, the line and the field of the first fault."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"the task file {path} cannot be read ({error.strerror}); name an existing file") from error
    tasks: dict[str, Task] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        task = check(_resolved(_parse(line, where), path.parent.resolve()), where)
        if task.id in tasks:
            raise UserError(f"{where}: id {task.id!r} is used twice; give every task its own")
        tasks[task.id] = pinned(task)
    if not tasks:
        raise UserError(f"the task file {path} holds no task; write one JSON object per line")
    return list(tasks.values())


def _parse(line: bytes, where: str) -> Task:
    try:
        table = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not a JSON object ({error}); write one object per line") from error
    return checked(table, Task, where)


def _resolved(task: Task, base: Path) -> Task:
    """The task with absolute paths of its directories."""
    replace = msgspec.structs.replace

    def absolute(directories: Directories) -> Directories:
        return {path: str(base / source) for path, source in directories.items()}

    def judged(verifier: Verifier) -> Verifier:
        return replace(verifier, directories=absolute(verifier.directories))

    def solved(solution: Solution | None) -> Solution | None:
        return solution and replace(solution, directories=absolute(solution.directories))

    def step_of(step: Step) -> Step:
        return replace(
            step,
            directories=absolute(step.directories),
            verifier=judged(step.verifier),
            solution=solved(step.solution),
        )

    def built(image: TaskImage) -> TaskImage:
        return replace(image, directory=str(base / image.directory)) if image.directory else image

    return replace(
        task,
        image=task.image and built(task.image),
        services=tuple(replace(service, image=built(service.image)) for service in task.services),
        directories=absolute(task.directories),
        verifier=judged(task.verifier),
        solution=solved(task.solution),
        steps=tuple(step_of(step) for step in task.steps),
    )


def pinned(task: Task) -> Task:
    """The task with a digest of its directories' content, so that a changed directory makes another task."""
    directories = sorted({Path(source) for source in _sources(task)})
    if not directories:
        return msgspec.structs.replace(task, digest="")
    return msgspec.structs.replace(task, digest=digest_of(directories))


def _sources(task: Task) -> Iterator[str]:
    for image in (task.image, *(service.image for service in task.services)):
        if image is not None and image.directory:
            yield image.directory
    for part in (task, task.verifier, task.solution, *task.steps):
        if part is not None:
            yield from part.directories.values()
    for step in task.steps:
        yield from step.verifier.directories.values()
        if step.solution is not None:
            yield from step.solution.directories.values()


def digest_of(directories: Iterable[Path]) -> str:
    """Digest of the names, modes and contents of all files in these directories."""
    digest = hashlib.sha256()
    for directory in directories:
        for path in sorted(directory.rglob("*")):
            mode = path.lstat().st_mode
            content = (
                str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
            )
            digest.update(f"{path.relative_to(directory)}\0{mode:o}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
