"""Tasks: one JSON line each, checked in full before anything starts.

The verifier's files reach the sandbox only after the agent has ended. Left out: images and task directories of other
projects.
"""

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from proxy.pool.errors import UserError

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(gt=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Files = dict[Text, str]

MAX_INSTRUCTION = 100_000
"""Bytes. The instruction is an argument of the agent's process, and Linux takes at most 128 KiB for one."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Verifier(_Strict, frozen=True, kw_only=True):
    """What gives the verdict: exit 0 is reward 1, exit 1 is reward 0, and on exit 0 a number in $REWARD_FILE counts."""

    command: Text
    files: Files = {}
    """Path -> text, written after the agent has ended and its processes are gone."""
    timeout: Seconds = 120


class TaskLimits(_Strict, frozen=True, kw_only=True):
    """What each command in the sandbox may use: set-up, agent and verifier."""

    memory_mb: Count | None = 4096
    cpu_seconds: Seconds | None = None
    output_kb: Count = 1024


class Task(_Strict, frozen=True, kw_only=True):
    """One line of tasks.jsonl."""

    id: Text
    instruction: Text
    verifier: Verifier
    files: Files = {}
    """Path -> text, there before set-up. Relative to the agent's working directory; `~/` is its home."""
    setup: str = ""
    """Shell command before the agent starts."""
    setup_timeout: Seconds = 120
    timeout: Seconds = 600
    """Wall seconds of the agent. Then it is ended, and the verifier judges what it left."""
    limits: TaskLimits = TaskLimits()
    domain: Text = "agent"
    """What kind of task this is: a column of every export. Nothing decides by it."""
    env: dict[str, str] = {}
    """Environment of set-up, agent and verifier."""
    metadata: dict[str, Any] = {}
    """Carried along, never shown to the agent."""


def load_tasks(path: Path) -> list[Task]:
    """Every task of the file; UserError names the file, the line and the field of the first fault."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"the task file {path} cannot be read ({error.strerror}); name an existing file") from error
    tasks: dict[str, Task] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        task = _parse(line, f"{path} line {number}")
        if task.id in tasks:
            raise UserError(f"{path} line {number}: id {task.id!r} is used twice; give every task its own")
        tasks[task.id] = task
    if not tasks:
        raise UserError(f"the task file {path} holds no task; write one JSON object per line")
    return list(tasks.values())


def _parse(line: bytes, where: str) -> Task:
    try:
        task = msgspec.json.decode(line, type=Task)
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at `$")
        field = at.strip("`.") or "the object"
        raise UserError(f"{where}: {field}: {reason}; correct the line") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not a JSON object ({error}); write one object per line") from error
    _check(task, where)
    return task


def _check(task: Task, where: str) -> None:
    size = len(task.instruction.encode())
    if size > MAX_INSTRUCTION or "\0" in task.instruction:
        raise UserError(
            f"{where}: instruction: {size} bytes; at most {MAX_INSTRUCTION}, no NUL: put long text in files"
        )
    for field, files in (("files", task.files), ("verifier.files", task.verifier.files)):
        for path in files:
            rest = path.removeprefix("~/")
            if not rest or rest.startswith("/") or ".." in Path(rest).parts or "\0" in rest:
                raise UserError(f"{where}: {field}: {path!r} leads out of the sandbox; use a relative path or ~/")
    for name in task.env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"{where}: env: {name!r} is no name of a variable; use letters, digits and _")
