"""Loads tasks from a JSONL file: one JSON object per line, all of them checked before anything starts.

Paths of directories are relative to the file. A line cannot include tasks from other files.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from harness.tasks.check import check
from harness.tasks.directories import check_context, check_directory, digest_of
from harness.tasks.schema import Directories, Solution, Step, Task, TaskImage, Verifier, built_images
from proxy.pool.errors import UserError
from proxy.pool.input_files import json_lines
from proxy.pool.settings_file import checked


def load_tasks(path: Path) -> list[Task]:
    """Load every task of a file. UserError names the file, the line and the field of the first fault."""
    tasks: dict[str, Task] = {}
    base = path.parent.resolve()
    for where, table in json_lines(path):
        task = check(_resolved(checked(table, Task, where), base), where)
        if task.id in tasks:
            raise UserError(f"{where}: id {task.id!r} is used twice; give every task its own")
        tasks[task.id] = pinned(task, where)
    if not tasks:
        raise UserError(f"the task file {path} holds no task; write one JSON object per line")
    return list(tasks.values())


def _resolved(task: Task, base: Path) -> Task:
    """The task with absolute paths of its directories."""
    replace = msgspec.structs.replace

    def absolute(directories: Directories) -> Directories:
        return {path: str(base / source) for path, source in directories.items()}

    def judged(verifier: Verifier) -> Verifier:
        own = verifier.environment
        if own is not None and own.image is not None:
            own = replace(own, image=built(own.image))
        return replace(verifier, directories=absolute(verifier.directories), environment=own)

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


def pinned(task: Task, where: str) -> Task:
    """The task with a digest of its directories' content, so that a changed directory makes another task.

    UserError when one of them must not enter a sandbox.
    """
    built, copied = list(built_images(task)), set(_copied(task))
    try:
        for image in built:
            check_context(Path(image.directory), image.dockerfile)
        for source in sorted(copied):
            check_directory(Path(source))
        directories = sorted({Path(source) for source in copied | {image.directory for image in built}})
        return msgspec.structs.replace(task, digest=digest_of(directories) if directories else "")
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _copied(task: Task) -> Iterator[str]:
    for part in (task, task.verifier, task.solution, *task.steps):
        if part is not None:
            yield from part.directories.values()
    for step in task.steps:
        yield from step.verifier.directories.values()
        if step.solution is not None:
            yield from step.solution.directories.values()
