"""Exit codes in the frames that agents put around a command's output: before it, or behind it.

A command can print what looks like a frame. One behind the output is the agent's where it ends the result. One before
it is known by the agent's other results, which all begin with one (`frames_first`).
"""

import re
from collections.abc import Iterable

from proxy.pool.behaviour.frames import unframed
from proxy.pool.completions.observed import ToolResult

_FIRST = (
    re.compile(r"\A(?:Chunk ID: .*\n)?(?:Wall time: .*\n)?(?:Process exited with code|Exit code:) (-?\d+)"),  # codex
    re.compile(r'\A\{\s*"returncode": ?(-?\d+)'),  # mini-swe-agent
    re.compile(r"\A\s*<returncode>(-?\d+)</returncode>"),
)
_FLAGGED = re.compile(r"\A(?:Error: )?Exit code (\d+)\b")
"""Claude Code, in results that it flags as errors."""
_LAST = (
    re.compile(r"\[exit code: (-?\d+)\]\s*\Z", re.IGNORECASE),  # the project's own agents
    re.compile(  # OpenHands
        r"\[(?:The command completed|Command finished) with exit code (-?\d+)\.?\]?(?:\s*\[[^\[\]\n]*\])*\s*\Z"
    ),
    re.compile(r'"metadata": ?\{"exit_code": ?(-?\d+)[^{}]*\}\s*\}?\s*\Z'),  # codex, older
    re.compile(  # qwen-code, gemini-cli
        r"^Exit Code: (-?\d+)(?:\n(?:Signal|Background|Process Group)[^\n]*)+\s*\Z", re.MULTILINE
    ),
)
REFUSED = re.compile(
    r"\A\s*(?:<tool_use_error>|Error:|Error (?:executing|calling|reading|writing)|failed to parse function arguments"
    r"|unsupported call:|The arguments provided to the tool are invalid|Invalid tool|InputValidationError"
    r"|(?:Tool|Unknown tool|No such tool)\b.{0,80}(?:not found|unavailable|unknown|does not exist)|Unknown tool"
    r"|Could not find|File not found|oldString not found|String to replace not found|No replacement was performed"
    r"|params must|\{\"error\":)",
)
"""How agents begin a result that no program has written."""


def code_before(result: ToolResult) -> int | None:
    """Return the exit code in a frame before the output; None: there is none."""
    return _code(_FIRST, result.head)


def code_behind(result: ToolResult) -> int | None:
    """Return the exit code in a frame behind the output; None: there is none."""
    return _code(_LAST, result.tail or result.head)


def flagged_code(result: ToolResult) -> int | None:
    """Return the exit code that stands beside an error flag; None: there is none."""
    return (_code((_FLAGGED,), result.head) or None) if result.error else None


def _code(patterns: Iterable["re.Pattern[str]"], text: str) -> int | None:
    return next((int(match[1]) for pattern in patterns if (match := pattern.search(text))), None)


def frames_first(results: Iterable[ToolResult]) -> bool:
    """Whether an agent prints its frame before the output: all results of one tool begin so, refused calls aside."""
    own = [unframed(each) for each in results if not each.error]
    return all(code_before(each) is not None or REFUSED.match(each.head) for each in own)
