"""Checks of a task that a schema cannot express. Each fault is one sentence that begins with the field."""

import math
import re
from collections.abc import Iterator, Sequence
from ipaddress import ip_network
from pathlib import Path, PurePosixPath

import msgspec

from harness.tasks.directories import is_directory
from harness.tasks.schema import MAX_INSTRUCTION, MAX_NAME, MAX_PATTERN, Task, TaskImage, Verifier
from harness.tasks.where import verified_fresh
from proxy.pool.errors import UserError
from proxy.pool.input_files import shortened
from sandboxes.local.system_calls import REFUSED

NEEDS = {"exact": "answer", "math": "answer", "regex": "pattern", "judge": "rubric", "code": "path"}
"""Kind of checker -> the field that it needs."""
_WIDE_RANGE = re.compile(r"-(?:[^\x00-\xff]|\\[uUN])")
"""The end of a range that may reach beyond U+00FF. When Python compiles a pattern, it goes through each character of
such a range, which takes up to 40 ms. Other parts take a millisecond at most."""
MAX_WIDE_RANGES = 8


def check(task: Task, where: str) -> Task:
    """Return the task. UserError for its first fault; `where` names its place in the message."""
    for fault in _faults(task):
        raise UserError(f"{where}: {fault}")
    return task


def _faults(task: Task) -> Iterator[str]:
    yield from _name_faults("id", task.id)
    if task.domain == "agent":
        yield from _agent_faults(task)
    else:
        yield from _answer_faults(task)
    if task.image is not None:
        yield from _image_faults("image", task.image)
    for index, service in enumerate(task.services):
        yield from _image_faults(f"services[{index}].image", service.image)
        yield from _environment_faults(f"services[{index}].env", service.env)
        if [other.name for other in task.services].count(service.name) > 1 or service.name == "localhost":
            yield f"services[{index}].name: {service.name!r} is taken; give every service its own"
    yield from _server_faults(task)
    for place in task.reach:
        try:
            ip_network(place)
        except ValueError as error:
            yield f"reach: {place!r} is no address or network ({error}); write it as 10.0.0.5 or 10.0.0.0/8"
    for call in task.limits.system_calls:
        if call not in REFUSED:
            yield f"limits.system_calls: sandboxes refuse no call {call!r}; only these: {', '.join(REFUSED)}"
    yield from _environment_faults("env", task.env)
    yield from _path_faults("files", task.files)
    yield from _path_faults("directories", task.directories)
    yield from _verifier_faults("verifier", task)
    for index, step in enumerate(task.steps):
        yield from _name_faults(f"steps[{index}].name", step.name)
        yield from _instruction_faults(f"steps[{index}].instruction", step.instruction)
        yield from _path_faults(f"steps[{index}].directories", step.directories)
        yield from _verifier_faults(f"steps[{index}].verifier", _with(task, step.verifier))
    if task.work and not task.work.startswith("/"):
        yield f"work: {task.work!r} must be absolute in the sandbox; begin it with /"


def _server_faults(task: Task) -> Iterator[str]:
    names = [server.name for server in task.mcp]
    for index, server in enumerate(task.mcp):
        field = f"mcp[{index}]"
        if bool(server.command) == bool(server.url):
            yield f"{field}: gives {'both a' if server.url else 'no'} command and url; give one of them"
        if server.url and not server.url.startswith(("http://", "https://")):
            yield f"{field}.url: {server.url!r} is no address; begin it with http:// or https://"
        if server.url and server.env:
            yield f"{field}.env: goes with a command, not with a url; remove it"
        if names.count(server.name) > 1:
            yield f"{field}.name: {server.name!r} is taken; give every server its own"
        yield from _environment_faults(f"{field}.env", server.env)
    if task.mcp and task.domain != "agent":
        yield f"mcp: a task of domain {task.domain!r} is one model call without tools; use the domain 'agent'"


def _agent_faults(task: Task) -> Iterator[str]:
    if task.checker is not None:
        yield f"checker: goes with the domains reasoning and qa, not with {task.domain!r}; use a verifier"
    if not task.steps:
        if not (task.verifier.command or task.verifier.cases):
            yield "verifier: a task of domain 'agent' has none without a command; give it one, e.g. \"sh check.sh\""
        yield from _instruction_faults("instruction", task.instruction)
    for index, step in enumerate(task.steps):
        if not (step.verifier.command or step.verifier.cases):
            yield f"steps[{index}].verifier: has no command; give it one"
        if (
            step is not task.steps[-1]
            and step.verifier.network == "full" != task.network
            and not verified_fresh(_with(task, step.verifier), "docker")  # others have no such network to open
        ):
            yield f"steps[{index}].verifier.network: 'full' would stay for the next step's agent; use where = 'fresh'"
        if [other.name for other in task.steps].count(step.name) > 1:
            yield f"steps[{index}].name: {step.name!r} is used twice; give every step its own"


def _with(task: Task, verifier: Verifier) -> Task:
    return msgspec.structs.replace(task, verifier=verifier)


def _answer_faults(task: Task) -> Iterator[str]:
    checker = task.checker
    if checker is None:
        yield f"checker: a task of domain {task.domain!r} needs one; give its kind: exact, regex, math, code or judge"
        return
    if not msgspec.structs.asdict(checker)[NEEDS[checker.kind]]:
        field = NEEDS[checker.kind]
        yield f"checker.{field}: the kind {checker.kind!r} needs it; fill it in"
    if checker.kind == "regex":
        yield from _pattern_faults(checker.pattern)
    if (checker.kind == "code") != bool(task.verifier.command or task.verifier.cases):
        yield "verifier: goes with the checker kind 'code', which needs one, and with no other; give a command there"
    if checker.kind == "code":
        yield from _path_faults("checker.path", {checker.path: ""})
    if task.steps:
        yield f"steps: a task of domain {task.domain!r} is one model call; use the domain 'agent'"
    yield from _instruction_faults("instruction", task.instruction)


def _pattern_faults(pattern: str) -> Iterator[str]:
    if len(pattern) > MAX_PATTERN:
        yield f"checker.pattern: {len(pattern)} characters; at most {MAX_PATTERN}: shorten it"
        return
    if (wide := len(_WIDE_RANGE.findall(pattern))) > MAX_WIDE_RANGES:
        rule = f"at most {MAX_WIDE_RANGES} are quick to compile; use fewer of them"
        yield f"checker.pattern: {wide} ranges of characters that reach beyond \u00ff, and {rule}"
        return
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield f"checker.pattern: {shortened(repr(pattern))} is no regular expression ({error}); correct it"


def _name_faults(field: str, name: str) -> Iterator[str]:
    if len(name) > MAX_NAME or not name.isprintable():  # it is shown on terminals
        yield f"{field}: {shortened(ascii(name))} is no name; use at most {MAX_NAME} characters, all of them visible"


def _instruction_faults(field: str, text: str) -> Iterator[str]:
    size = len(text.encode())
    if not size:
        yield f"{field}: is empty; say what is to be done"
    if size > MAX_INSTRUCTION or "\0" in text:
        yield f"{field}: {size} bytes; at most {MAX_INSTRUCTION}, no NUL: put long text in files"


def _image_faults(field: str, image: TaskImage) -> Iterator[str]:
    if not image.name and not image.directory:
        yield f"{field}: names nothing; give a name or a directory"
    if Path(image.dockerfile).is_absolute() or ".." in Path(image.dockerfile).parts:
        yield f"{field}.dockerfile: {image.dockerfile!r} leads out of the directory; name a file in it"
    if image.directory and not is_directory(image.directory):
        yield f"{field}.directory: {image.directory} is no directory; correct the path"


def _verifier_faults(field: str, task: Task) -> Iterator[str]:
    verifier, services = task.verifier, [service.name for service in task.services]
    yield from _path_faults(f"{field}.files", verifier.files)
    yield from _path_faults(f"{field}.directories", verifier.directories)
    yield from _environment_faults(f"{field}.env", verifier.env)
    if verifier.command and verifier.cases:
        yield f"{field}.cases: the command would not be run; give one of the two"
    if verifier.cases and tuple(verifier.range) != (0.0, 1.0):
        yield f"{field}.range: cases give rewards from 0 to 1; remove it"
    for index, case in enumerate(verifier.cases):
        if bool(case.command) == bool(case.call):
            yield f"{field}.cases[{index}]: gives {'both a' if case.call else 'no'} command and call; give one of them"
    if len({case.name or str(index) for index, case in enumerate(verifier.cases)}) < len(verifier.cases):
        yield f"{field}.cases: two have the same name; give every case its own"
    lowest, highest = verifier.range
    if not (math.isfinite(lowest) and math.isfinite(highest) and lowest < highest):
        yield f"{field}.range: {lowest:g} to {highest:g} holds no rewards; give the lowest one, then the highest"
    if (own := verifier.environment) is not None:
        if not verified_fresh(task, "docker"):
            yield f"{field}.environment: goes with a fresh sandbox; set where = 'fresh', or remove it"
        if own.image is not None:
            yield from _image_faults(f"{field}.environment.image", own.image)
        if own.work and not own.work.startswith("/"):
            yield f"{field}.environment.work: {own.work!r} must be absolute in the sandbox; begin it with /"
        yield from _environment_faults(f"{field}.environment.env", own.env)
    for index, artifact in enumerate(verifier.artifacts):
        rest = PurePosixPath(artifact.place.removeprefix("~/"))
        if not artifact.place.removeprefix("~/") or ".." in rest.parts or "\0" in artifact.path or str(rest) == "/":
            yield f"{field}.artifacts[{index}].path: {artifact.path!r} is no place in the sandbox; name a path in it"
        if artifact.service and artifact.service not in services:
            yield f"{field}.artifacts[{index}].path: {artifact.service!r} {_no_service(services)}"
    for index, one in enumerate(verifier.collect):
        if one.service and one.service not in services:
            yield f"{field}.collect[{index}].service: {one.service!r} {_no_service(services)}"


def _no_service(services: Sequence[str]) -> str:
    return f"is no service of the task; it has {', '.join(services) or 'none'}"


def _path_faults(field: str, entries: dict[str, str]) -> Iterator[str]:
    """Files must be below the working directory or the home. Directories may be anywhere, and must exist here."""
    directories = field.endswith("directories")
    for path, source in entries.items():
        rest = path.removeprefix("~/")
        if not rest or ".." in Path(rest).parts or "\0" in rest or (rest.startswith("/") and not directories):
            yield f"{field}: {path!r} leads out of the sandbox; use a relative path or ~/"
        if directories and rest.strip("/") == "":
            yield f"{field}: {path!r} is all of the sandbox; name a directory in it"
        if directories and not is_directory(source):
            yield f"{field}: {source} is no directory; correct the path"


def _environment_faults(field: str, env: dict[str, str]) -> Iterator[str]:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"{field}: {name!r} is no name of a variable; use letters, digits and _"
        if "\0" in value:
            yield f"{field}: the value of {name} holds a NUL; remove it"
