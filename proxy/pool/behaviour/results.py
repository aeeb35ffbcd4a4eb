"""Whether a tool's result says that the call failed: by the dialect's flag, an exit code, a known text, a time-out.

Only the places where agents write such things count: a log that the agent prints may speak of any failure. An exit code
that answers a question (`grep` without a match, a test that fails) is no failure of the call.
"""

import re

from proxy.pool.behaviour.actions import Action
from proxy.pool.behaviour.exits import REFUSED, code_before, code_behind, flagged_code
from proxy.pool.behaviour.frames import unframed
from proxy.pool.completions.observed import ToolResult

_SHELL = re.compile(
    r"^(?:/(?:usr/)?bin/)?(?:ba|z|da|)sh: "
    r".*(?:not found|No such file or directory|[Pp]ermission denied|syntax error.*)$"
)
_PROGRAM = re.compile(r"^(?P<program>[\w.+-]+): .*(?:No such file or directory|Permission denied|[Ii]s a directory)$")
_RAISED = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)(?::.*)?$")
_TIMED_OUT = re.compile(
    r"^\W{0,3}(?:Error: |The )?(?:\w+ )?(?:command|tool|process|execution|call|request)\b"
    r"[^\n]{0,60}(?:timed out|exceed\w* (?:the )?time-?out)|\A\s*Time(?:d )?out\b|^subprocess\.TimeoutExpired",
    re.IGNORECASE | re.MULTILINE,
)
TIMEOUT_CODES = (124, 137)
"""Exit codes of `timeout`."""
ANSWERS = {"grep", "egrep", "fgrep", "rg", "ag", "diff", "cmp", "test", "[", "[[", "pgrep", "which", "command",
           "git diff", "git grep", "false", "expr"}  # fmt: skip
"""Programs that exit with 1 to say no."""
RUNNERS = re.compile(
    r"^(?:py\.?test|tox|nox|unittest|nosetests|jest|vitest|mocha|ctest|rspec|phpunit|npm (?:test|run|t)|yarn \w+"
    r"|pnpm \w+|npx|go (?:test|vet)|cargo (?:test|check|clippy)|make|mvn|gradle|gradlew|ruff|mypy|flake8|eslint|tsc)$"
)
"""Programs whose exit code says that the code under test, and not the call, is wrong."""
RUNNER_CODES = range(1, 3)
ERROR_LENGTH = 300
"""Characters that an error has at most in place of a file's content."""


def failure(action: Action) -> str:
    """Return why the call failed, as far as its result says; empty: it did not, or nothing is known of it."""
    if action.result is None:
        return ""
    result = unframed(action.result)
    codes = _codes(action, result)
    code = next(filter(None, codes), 0 if codes else None)
    ends = f"{result.head[:ERROR_LENGTH]}\n{(result.tail or result.head)[-ERROR_LENGTH:]}"
    stopped = code in TIMEOUT_CODES or (code != 0 and bool(_TIMED_OUT.search(ends)))
    if stopped and (result.error or code is not None or action.sort == "shell"):
        return "time-out"
    if code is not None:
        return f"exit code {code}" if code != 0 and not _answers(action, code, result) else ""
    if result.error:
        return "flag"
    if action.sort == "shell":
        return "shell" if _shell_failed(action, result) else "refused" if REFUSED.match(result.head) else ""
    whole = result.size <= ERROR_LENGTH or action.sort in ("edit", "other")
    return "refused" if whole and REFUSED.match(result.head) else ""


def certainly_failed(action: Action) -> bool:
    """Whether a call failed, and not only by what its output says, which a command can print to look as if it had."""
    if action.result is None or not failure(action):
        return False
    if action.result.error or action.sort not in ("shell", "other"):  # the agent wrote all of the result
        return True
    codes = _codes(action, unframed(action.result))
    return bool(codes) and all(codes)


def _codes(action: Action, result: ToolResult) -> list[int]:
    """The exit codes in the agent's frames. Where there are two, a command has printed one of them."""
    first = code_before(result) if action.frames_first else None
    return [code for code in (flagged_code(result), code_behind(result), first) if code is not None]


def _answers(action: Action, code: int, result: ToolResult) -> bool:
    """Whether an exit code is the answer to what was asked."""
    if not action.commands or any(_SHELL.match(line) for line in _lines(result)):
        return False
    last = action.commands[-1]
    if code == 1 and (last.head in ANSWERS or last.program in ANSWERS):
        return True
    return code in (*RUNNER_CODES, 101) and any(RUNNERS.match(command.head) for command in action.commands)


def _shell_failed(action: Action, result: ToolResult) -> bool:
    """Whether output without an exit code ends as that of a program that failed."""
    lines = _lines(result)
    last = lines[-1] if lines else ""
    if _SHELL.match(last):
        return True
    if (match := _PROGRAM.match(last)) and any(match["program"] == command.program for command in action.commands):
        return True
    return "Traceback (most recent call last):" in result.head + result.tail and bool(_RAISED.match(last))


def _lines(result: ToolResult) -> list[str]:
    return [line for line in (result.tail or result.head).splitlines() if line.strip()]
