"""A careless teacher for the scripted engine: it can do the demo's tasks and is unreliable at them.

It always reads the note first. Then it takes the right operator in 65 % and the right program in 60 % of cases. So a
model that imitates it well succeeds in less than half of its attempts, which leaves something for reinforcement. Its
choices are a hash of the prompt and of how often that was asked, so the same run gives the same rollouts.

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
    turn = prompt_text.rsplit("<|im_start|>user\n", 1)[-1]
    asked[prompt_text] += 1
    if note := ASK.search(turn):
        return call(f"cat {note[1]}")
    if lines := APPEND.search(turn):
        return call(careless(prompt_text, word=lines[1], operator=">>", other=">", file=lines[2]))
    if lines := REPLACE.search(turn):
        return call(careless(prompt_text, word=lines[2], operator=">", other=">>", file=lines[1]))
    return "Done."


def careless(prompt_text: str, word: str, operator: str, other: str, file: str) -> str:
    """Return the right command, or one with the other operator or another program."""
    digest = hashlib.sha256(f"{asked[prompt_text]}\n{prompt_text}".encode()).digest()
    luck, skill = (int.from_bytes(part) / 2**32 for part in (digest[:4], digest[4:8]))
    program = "echo" if skill < RIGHT_PROGRAM else "cat"
    return f"{program} {word} {operator if luck < RIGHT_OPERATOR else other} {file}"


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {json.dumps({"command": command})}}}\n</tool_call>'
