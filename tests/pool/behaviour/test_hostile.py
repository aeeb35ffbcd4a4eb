"""No text of a policy's or of a tool's makes the readers of behaviour raise: a run would end with them."""

import json
import random
from typing import Any

import pytest

from proxy.pool.behaviour.actions import actions
from proxy.pool.behaviour.process import ProcessRule, TurnFigures, turn_rewards
from proxy.pool.behaviour.read import events
from proxy.pool.behaviour.shell import commands
from proxy.pool.completions.observed import Observed, ToolResult
from tests.pool.behaviour.work import Row

PIECES = (
    "cat", "bash -c", "eval", "sudo", "timeout", "python -m", "python -m " * 2000, "git log", "sed -i", "tee", "A=1",
    "<", "<<", "<<<", ">", "2>&1", "<<EOF\n", "\nEOF\n", "EOF", "'", '"', "`", "$(", ")", "\\", "\n", ";", "|", "&&",
    "#", "²", "①", "٣", "0", "7", "-1", "5" * 5000, "1e999", "\0", "\ud800", "\u2028", "é", "```bash\n", "```",
    "[" * 980, "*** Update File: a.py\n+x\n", '{"keystrokes": "ls\\ud800\\n"}', '{"command": ', "]", "}",
    "[exit code: ²]",
    "[exit code: 3]", "Exit code: ", "Exit Code: ٣\nSignal", '{"returncode": -', "Traceback (most recent call last):\n",
    "<returncode>", "</returncode>", "Output:\n", "/tests/a.py", "sh: 1: not found", "rm -rf /", "curl http://a",
)  # fmt: skip
TOOLS = ("bash", "shell", "edit", "write", "read", "grep", "webfetch", "", "²", "apply_patch", "str_replace_editor")
FIELDS = ("command", "path", "content", "old_string", "edits", "cmd", "filePath", "input")


def text(chance: random.Random, most: int = 9) -> str:
    """Some pieces in a row."""
    glue = chance.choice(("", " ", " ", "\n"))
    return glue.join(chance.choice(PIECES) for _ in range(chance.randrange(1, most)))


def arguments(chance: random.Random) -> str:
    """The arguments of a call: JSON of any shape, or none."""
    shape = chance.randrange(6)
    if shape == 0:
        return text(chance)
    if shape == 1:
        return f'{{"command": [{"9" * chance.choice((30, 5000))}, "-lc", {"[" * 990}{"]" * 990}]}}'
    values: tuple[Any, ...] = (
        [text(chance)],
        [{"content": text(chance)}, 3],
        None,
        1.5,
        {"a": {}},
        *[text(chance)] * 6,
    )
    return json.dumps({name: chance.choice(values) for name in chance.sample(FIELDS, 3)})


def row(chance: random.Random, id: int) -> Row:
    """A completion that calls tools, or speaks, and shows the results of the calls before it."""
    calls = [
        {"id": f"c{place}", "function": {"name": chance.choice(TOOLS), "arguments": arguments(chance)}}
        for place in range(chance.randrange(3))
    ]
    shown = [text(chance)[:500] for _ in range(chance.randrange(3))]
    results = tuple(
        ToolResult(f"c{place}", "", each[:300], each[300:], len(each), chance.random() < 0.2, chance.random() < 0.3)
        for place, each in enumerate(shown)
    )
    reply = {"content": text(chance), "reasoning_content": text(chance)} | ({"tool_calls": calls} if calls else {})
    return Row(id, id - 1 or None, "tool_calls" if calls else "stop", reply, Observed(results=results))


def test_random_hostile_conversations_never_raise() -> None:
    """The seed is fixed. These conversations have about 1,200 calls and 4,000 texts."""
    chance = random.Random(20)
    for _ in range(200):
        rows = [row(chance, id) for id in range(1, 7)]
        found = events(rows)
        assert sum(event.kind == "tool_called" for event in found) == sum(map(len, actions(rows).values()))


@pytest.mark.parametrize("word", ["²", "①", "٣", "5" * 5000, "0", "9"])
def test_a_number_behind_a_redirection_names_no_text(word: str) -> None:
    assert [command.line for command in commands(f"cat <{word}; ls")] == ["cat", "ls"]
    assert [command.line for command in commands(f": < {word}")] == [":"]


def test_deeply_nested_arguments_are_no_arguments() -> None:
    """Python decodes more levels than it may be able to write again, which depends on who calls."""
    for depth in (99, 100, 400, *range(980, 1000)):
        written = f'{{"command": {"[" * depth}{"]" * depth}}}'
        rows = [Row(1, None, "tool_calls", {"tool_calls": [{"function": {"name": "x", "arguments": written}}]}, None)]
        assert [event.kind for event in events(rows)] == ["tool_called", *["malformed_call"] * (depth > 99)]


def test_modules_that_run_modules_are_opened_up_to_a_depth() -> None:
    assert commands("python -m coverage -m x")[0].head == "coverage"
    assert commands("python -m " * 3 + "pytest -q")[0].head == "pytest"
    assert commands("python -m " * 1900)[0].head == "python"


def test_a_part_with_endless_or_foreign_digits_names_no_turn() -> None:
    rule = ProcessRule(labels=("main",), factor=1.0, bound=1.0, penalties={})
    parts = {"turn:0": 0.5, f"turn:{'5' * 5000}": 1.0, "turn:٠": 1.0}  # the last digit is an Arabic zero
    assert turn_rewards([TurnFigures(0, "main")], parts, rule) == ([0.5], 0)
