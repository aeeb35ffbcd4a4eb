"""A careless teacher for the scripted engine: it can do the demo's tasks and is unreliable at them.

It always reads the note first. Then it takes the right operator in 65 % and the right program in 60 % of cases. So a
model that imitates it well succeeds in less than half of its attempts, which leaves something for reinforcement. Its
choices are a hash of the prompt and of how often that was asked, so the same run gives the same rollouts. Teachers with
other habits (benchmarks/signal_runs/teachers.py) use the same functions.

usage: proxy engine CONFIG --scripted examples/demo/teacher.py:teach
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence

RIGHT_OPERATOR, RIGHT_PROGRAM = 0.65, 0.6
ASK = re.compile(r"Do what (\S+) says\.")
APPEND = re.compile(r"append (\S+) to (\S+)")
REPLACE = re.compile(r"replace (\S+) by (\S+)")

asked: Counter[str] = Counter()


def teach(prompt_text: str, prompt_ids: Sequence[int]) -> str:
    """Return the assistant's turn after a rendered prompt of the demo's tasks."""
    turn = last_turn(prompt_text)
    if note := ASK.search(turn):
        return call(f"cat {note[1]}")
    operator, program = draws(prompt_text)
    command = edit(turn, operator < RIGHT_OPERATOR, "echo" if program < RIGHT_PROGRAM else "cat")
    return call(command) if command else "Done."


def last_turn(prompt_text: str) -> str:
    """Return what came last: the task, or what a command printed."""
    return prompt_text.rsplit("<|im_start|>user\n", 1)[-1]


def draws(prompt_text: str) -> tuple[float, float]:
    """Return two numbers from 0 to 1 that depend on the prompt and on how often it was asked."""
    asked[prompt_text] += 1
    digest = hashlib.sha256(f"{asked[prompt_text]}\n{prompt_text}".encode()).digest()
    return int.from_bytes(digest[:4]) / 2**32, int.from_bytes(digest[4:8]) / 2**32


def edit(turn: str, right_operator: bool, program: str = "echo") -> str:
    """Return the command for a note that was just read, with the right operator or the other one; empty: no note."""
    if lines := APPEND.search(turn):
        return f"{program} {lines[1]} {'>>' if right_operator else '>'} {lines[2]}"
    if lines := REPLACE.search(turn):
        return f"{program} {lines[2]} {'>' if right_operator else '>>'} {lines[1]}"
    return ""


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {json.dumps({"command": command})}}}\n</tool_call>'
