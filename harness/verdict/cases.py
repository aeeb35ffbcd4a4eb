"""Verifies a task's cases: programs and functions of the agent's, each in a process of its own, by what comes out.

What must come out never enters the sandbox, so code under test cannot know it, and writes no reward: it is worked out
here, from exit codes and output. Each case runs as the agent's user, and what it leaves running is ended before the
next. A case that fails, or takes too long or too much memory, is wrong. Left out: hiding one case's input from the
program of a later one, where the program keeps notes.
"""

import json
import math
import secrets
import shlex
from typing import Any

from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.tasks.schema import Case
from harness.verdict.rewards import Verdict
from sandboxes.base import Limits, Result, Sandbox, SandboxError

TRIES = 3
"""How often a case is run whose output lost its end, as it may on a busy machine."""
CALL = """
import importlib, json, os, sys
work, module, function = sys.argv[1:]
arguments, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
sys.path.insert(0, work)
result = getattr(importlib.import_module(module), function)(*arguments)
out.write(json.dumps(result))
out.flush()
"""
"""Calls a function with the arguments that stand in its input, and prints what it returns; what it prints is dropped.
Started with -I, so that nothing beside it is imported but what the case names."""


async def verify_cases(sandbox: Sandbox, task: Task) -> Verdict:
    """The share of the cases that are right, by their weights. Each is a part of the verdict."""
    cases, parts = task.verifier.cases, {}
    if any(case.call for case in cases):
        await _need_python(sandbox, task)
    for number, case in enumerate(cases):
        result = await _whole(sandbox, task, case)
        parts[f"case:{case.name or number}"] = float(is_right(case, result))
    total = math.fsum(case.weight for case in cases)
    right = math.fsum(case.weight * passed for case, passed in zip(cases, parts.values(), strict=True))
    return Verdict(right / total, parts)


async def _need_python(sandbox: Sandbox, task: Task) -> None:
    result = await sandbox.run("command -v python3", Limits(seconds=60), task.verifier_env())
    if result.exit_code:
        raise AttemptFailed("verifier", "a case calls a function, and the sandbox has no python3; add it to the image")


async def _whole(sandbox: Sandbox, task: Task, case: Case) -> Result:
    """Run a case, again where the end of its output was lost, and end what it leaves. SandboxError if it is every time.

    Code under test can take its output away itself, so a case is never right or wrong by that.
    """
    for _ in range(TRIES):
        result = await _run(sandbox, task, case)
        await sandbox.end_processes()
        if not result.cut:
            return result
    raise SandboxError("the end of a case's output was lost, so nobody knows whether it is right; try again")


async def _run(sandbox: Sandbox, task: Task, case: Case) -> Result:
    command, given = case.command, case.input
    if case.call:
        module, _, function = case.call.partition(":")
        words = ["python3", "-I", "-c", CALL, sandbox.work, module, function]
        command, given = " ".join(map(shlex.quote, words)), json.dumps(case.args)
    name = f"input-{secrets.token_hex(8)}"
    await sandbox.write(f"~/{name}", given)
    source = shlex.quote(f"{sandbox.home}/{name}")
    limits = task.command_limits(case.timeout)
    inside = f"exec <{source}; rm -f {source}; exec 2>/dev/null; {command}"
    return await sandbox.run(inside, limits, task.verifier_env())


def is_right(case: Case, result: Result) -> bool:
    """Whether a case came out as it must. Blanks at the ends of lines and empty lines at the end do not count."""
    if result.ended != "exit" or result.exit_code != case.exit_code or result.dropped:
        return False
    if case.call:
        try:
            return _equal(json.loads(result.output), case.returns)
        except (ValueError, RecursionError, OverflowError):
            return False
    return case.output is None or _lines(result.output) == _lines(case.output)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _equal(value: Any, expected: Any) -> bool:
    """Whether two JSON values are equal. Floats count as equal to nine digits; true is not 1."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return numbers and math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_equal(value[key], expected[key]) for key in value)
    return bool(value == expected)
