"""What shells and programs write when a command of a script fails, and of which command they write it.

The exit code of a script is that of its last command: `cat a.txt; true` ends with 0 whatever `cat` did. For the other
commands only their error texts tell. Such a text names the command and one of its arguments, so a log that the script
prints does not pass for one. Left out: errors whose text goes elsewhere (`2>/dev/null`), and those of other programs.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from proxy.pool.behaviour.shell import Command

RUNNERS = re.compile(
    r"^(?:py\.?test|tox|nox|unittest|nosetests|jest|vitest|mocha|ctest|rspec|phpunit|npm (?:test|run|t)|yarn \w+"
    r"|pnpm \w+|npx|go (?:test|vet)|cargo (?:test|check|clippy)|make|mvn|gradle|gradlew|ruff|mypy|flake8|eslint|tsc)$"
)
"""Programs whose exit code says that the code under test, and not the call, is wrong."""
SHELL = re.compile(
    r"^(?:/(?:usr/)?bin/)?(?:ba|z|da|)sh: "
    r".*(?:not found|No such file or directory|[Pp]ermission denied|syntax error.*)$"
)
PROGRAM = re.compile(r"^(?P<program>[\w.+-]+): .*(?:No such file or directory|Permission denied|[Ii]s a directory)$")
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)(?::.*)?$")
_PYTHON = re.compile(r"python[\d.]*")
_NOT_STARTED = re.compile(r"^(?:/\S*/)?python[\d.]*: (?:No module named \S+|can't open file .+)$")
_QUIET = {"echo", "printf", "true", ":", "exit", "false"}
"""Commands that end a script with a code that they choose, or with that of the command before them."""
_FILTERS = {"head", "tail", "cat", "tee", "sort", "uniq", "wc"}


def deciding(script: Sequence[Command]) -> Command | None:
    """Return the command whose exit code a script ends with where that is not 0; None: there is none.

    What ends with a code of its own choice, and what only prints the output of a pipe, is passed over: a failure
    beside them is that of the command before.
    """
    return next((command for command in reversed(script) if not _passed_over(command)), None)


def _passed_over(command: Command) -> bool:
    if command.program in _QUIET:
        return True
    reads = [word for word in command.words[1:] if not word.startswith("-") and not word.isdigit()]
    return command.after == "|" and command.program in _FILTERS and (command.program == "tee" or not reads)


def tells_of(script: Sequence[Command], text: str) -> bool:
    """Whether a text has the error of one of these commands."""
    lines = [line for line in text.splitlines() if line.strip()]
    shown = [line for line in lines if SHELL.match(line) or PROGRAM.match(line)]
    if any(_names(command, line) for line in shown for command in script):
        return True
    python = any(_PYTHON.fullmatch(each.program) and not RUNNERS.match(each.head) for each in script)
    return python and (raised(text, lines) or any(map(_NOT_STARTED.match, lines)))


def not_started(script: Sequence[Command], line: str) -> bool:
    """Whether Python says in this line that what it was to run is not there."""
    return bool(_NOT_STARTED.match(line)) and any(_PYTHON.fullmatch(command.program) for command in script)


def raised(text: str, lines: Iterable[str]) -> bool:
    """Whether Python reports an error in a text, and one of these lines of it is the report's last one."""
    return "Traceback (most recent call last):" in text and any(map(_RAISED.match, lines))


def hidden(script: Sequence[Command]) -> Sequence[Command]:
    """Return the commands whose failure a script's exit code may not show: those before its last operator but `&&`."""
    return script[: max((place for place, command in enumerate(script) if command.after not in ("", "&&")), default=0)]


def _names(command: Command, line: str) -> bool:
    if not command.words:
        return False
    match = PROGRAM.match(line)
    if match is None or SHELL.match(line):
        return f" {command.words[0]}:" in line
    own = command.program == match["program"] and not RUNNERS.match(command.head)
    return own and any(word in line for word in _operands(command))


def _operands(command: Command) -> Iterator[str]:
    return (word for word in command.words[1:] if not word.startswith("-"))
