"""A forgetful teacher for the scripted engine: it can do the tasks, but its notes keep the word in 60 % of cases.

A model that imitates it well forgets as often, which leaves something for reinforcement. Its choices are a hash of the
prompt and of how often that was asked, so the same run gives the same rollouts.

usage: proxy engine CONFIG --scripted benchmarks/contexts/forgetful_teacher.py:teach
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence

KEPT = 0.6
"""The share of its notes that keep the word."""
FORGOTTEN = "this"
WORD, FILE = re.compile(r"append (\w+)"), re.compile(r"write to (\S+)")
NOTES = re.compile(r"shown any more:\necho (\w+)")

asked: Counter[str] = Counter()


def teach(prompt_text: str, prompt_ids: Sequence[int]) -> str:
    """Return the assistant's turn after a rendered prompt of the tasks."""
    asked[prompt_text] += 1
    word, noted, file = (pattern.search(prompt_text) for pattern in (WORD, NOTES, FILE))
    if "Do not call a tool now" in prompt_text and word:
        return f"echo {word[1] if _lucky(prompt_text) else FORGOTTEN}"
    if noted and file:
        return _call(f"echo {noted[1]} > {file[1]}")
    return _call("cat two.md" if noted else "cat one.md")


def _lucky(prompt_text: str) -> bool:
    digest = hashlib.sha256(f"{asked[prompt_text]}\n{prompt_text}".encode()).digest()
    return int.from_bytes(digest[:4]) / 2**32 < KEPT


def _call(command: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {json.dumps({"command": command})}}}\n</tool_call>'
