"""Whether a tool's result says that the call failed: by the dialect's flag, an exit code, a known text, a time-out.

Only the places where agents write such things count: a log that the agent prints may speak of any failure. An exit code
that answers a question (`grep` without a match, a test that fails) is no failure of the call.
"""

import re
from collections.abc import Iterator

from proxy.pool.behaviour.actions import Action
from proxy.pool.behaviour.commands.error_texts import (
    PROGRAM,
    RUNNERS,
    SHELL,
    deciding,
    hidden,
    not_started,
    raised,
    tells_of,
)
from proxy.pool.behaviour.exits import REFUSED, code_before, code_behind, flagged_code
from proxy.pool.behaviour.frames import unframed
from proxy.pool.completions.observed import HEAD, TAIL, ToolResult

_TIMED_OUT = re.compile(
    r"^\W{0,3}(?:Error: |The )?(?:\w+ )?(?:command|tool|process|execution|call|request)\b"
    r"[^\n]{0,60}(?:timed out|exceed\w* (?:the )?time-?out)|\A\s*Time(?:d )?out\b|^subprocess\.TimeoutExpired",
    re.IGNORECASE | re.MULTILINE,
)
TIMEOUT_CODES = (124, 137)
"""Exit codes of `timeout`."""
ANSWERS = {"grep", "egrep", "fgrep", "rg", "ag", "diff", "cmp", "test", "[", "[[", "pgrep", "which", "command",
           "git diff", "git grep", "expr"}  # fmt: skip
"""Programs that exit with 1 to say no."""
RUNNER_CODES = range(1, 3)
ERROR_LENGTH = 300
"""Characters that an error has at most in place of a file's content."""


def failure(action: Action) -> str:
    """Return why the call failed, as far as any of its results says; empty: it did not, or nothing is known of it."""
    return next((why for why, _ in failures(action)), "")


def failures(action: Action) -> Iterator[tuple[str, ToolResult]]:
    """Yield each result that says that the call failed, with why."""
    for result in action.results:
        if why := _failure(action, result):
            yield why, result


def _failure(action: Action, shown: ToolResult) -> str:
    """Why a call with this result failed; empty: it did not."""
    result = unframed(shown)
    codes = _codes(action, result)
    code = next(filter(None, codes), 0 if codes else None)
    ends = f"{result.head[:ERROR_LENGTH]}\n{(result.tail or result.head)[-ERROR_LENGTH:]}"
    stopped = code in TIMEOUT_CODES or (code != 0 and bool(_TIMED_OUT.search(ends)))
    if stopped and (result.error or code is not None or action.sort == "shell"):
        return "time-out"
    if code:
        return "" if _answers(action, code, result) else f"exit code {code}"
    if code is None and result.error:
        return "flag"
    if action.sort == "shell" and tells_of(hidden(action.commands), _text(result)):
        return "shell"
    if code == 0:
        return ""
    if action.sort == "shell":
        return "shell" if _shell_failed(action, result) else "refused" if REFUSED.match(result.head) else ""
    whole = result.size <= ERROR_LENGTH or action.sort in ("edit", "other")
    return "refused" if whole and REFUSED.match(result.head) else ""


def certainly_failed(action: Action) -> bool:
    """Whether a call failed by all of its results, and not only by what its output says.

    A command can print what looks as if it had failed, or send a request that shows a result of its own.
    """
    return bool(action.results) and all(_certainly(action, result) for result in action.results)


def _certainly(action: Action, result: ToolResult) -> bool:
    if not _failure(action, result):
        return False
    if result.error or action.sort not in ("shell", "other"):  # the agent wrote all of the result
        return True
    codes = _codes(action, unframed(result))
    return bool(codes) and all(codes)


def _codes(action: Action, result: ToolResult) -> list[int]:
    """The exit codes in the agent's frames. Where there are two, a command has printed one of them."""
    first = code_before(result) if action.frames_first else None
    return [code for code in (flagged_code(result), code_behind(result), first) if code is not None]


def _answers(action: Action, code: int, result: ToolResult) -> bool:
    """Whether an exit code is the answer to what was asked, by the command that it is of."""
    last = deciding(action.commands)
    if last is None or any(SHELL.match(line) or not_started(action.commands, line) for line in _lines(result)):
        return False
    if tells_of([each for each in action.commands if each is not last], _text(result)):
        return False
    if code == 1 and (last.head in ANSWERS or last.program in ANSWERS):
        return True
    return code in (*RUNNER_CODES, 101) and bool(RUNNERS.match(last.head))


def _shell_failed(action: Action, result: ToolResult) -> bool:
    """Whether output without an exit code ends as that of a program that failed."""
    lines = _lines(result)
    last = lines[-1] if lines else ""
    if SHELL.match(last):
        return True
    if (match := PROGRAM.match(last)) and any(match["program"] == command.program for command in action.commands):
        return True
    return not_started(action.commands, last) or raised(result.head + result.tail, [last])


def _text(result: ToolResult) -> str:
    """What is kept of a result, without a break where nothing is missing."""
    return result.head + ("\n" if result.size > HEAD + TAIL else "") + result.tail


def _lines(result: ToolResult) -> list[str]:
    return [line for line in (result.tail or result.head).splitlines() if line.strip()]
