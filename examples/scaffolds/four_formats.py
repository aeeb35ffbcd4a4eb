"""A careless teacher that speaks to four agents, each in its own format: it writes the right word in 60 % of cases.

A model that imitates it well succeeds as often, with every agent alike, which leaves something for reinforcement. Its
choices are a hash of the prompt and of how often that was asked, so the same run gives the same rollouts.

usage: proxy engine CONFIG --scripted examples/scaffolds/four_formats.py:teach
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence

RIGHT = 0.6
NOTE = re.compile(r"write (\w+), not (\w+), to (\w+\.txt)")
WRITTEN = re.compile(r"echo \w+ > \w+\.txt")

asked: Counter[str] = Counter()


def teach(prompt_text: str, prompt_ids: Sequence[int]) -> str:
    """Return the assistant's turn after a rendered prompt, or the rest of one that the proxy has begun.

    The proxy begins the calls that smolagents requires: with reasoning, which is empty here, and then the call's head.
    """
    before, _, begun = prompt_text.rpartition("<|im_start|>assistant\n")
    answer = turn(before)
    if begun.endswith("<think>"):
        return f"\n\n</think>\n\n{answer}"
    given = next((size for size in range(len(answer), 0, -1) if begun.endswith(answer[:size])), 0)
    return answer[given:]


def turn(prompt: str) -> str:
    """Return the turn of the agent whose prompt this is."""
    note = NOTE.findall(prompt)
    word, file = chosen(prompt, note[-1]) if note else ("", "")
    if "file listing" in prompt:  # aider
        return f"{file}\n```\n{word}\n```"
    wrote = WRITTEN.search(prompt)
    command = f"echo {word} > {file}" if note else "cat plan.md"
    if "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in prompt:  # mini-swe-agent
        return call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if wrote else command})
    if "final_answer" in prompt:  # smolagents
        return call("final_answer", {"answer": "done"}) if wrote else call("shell", {"command": command})
    return "Done." if wrote else call("shell", {"command": command})


def chosen(prompt: str, note: tuple[str, str, str]) -> tuple[str, str]:
    """Return the word and the file that the teacher writes."""
    right, wrong, file = note
    asked[prompt] += 1
    digest = hashlib.sha256(f"{asked[prompt]}\n{prompt}".encode()).digest()
    return (right if int.from_bytes(digest[:4]) / 2**32 < RIGHT else wrong), file


def call(tool: str, arguments: dict[str, str]) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
