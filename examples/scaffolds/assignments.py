"""Tasks that every agent can do in its own way: a note says what to write into which file, and what not.

"Do what plan.md says.", and the note says, for example, "write apple, not pear, to log.txt". Agents with a shell read
the note first; aider is given it by its own configuration file. No two tasks share word and file.
"""

import json
import random
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

from tasks import FILES, WORDS

from harness.tasks.sources import load_sources

INSTRUCTION = "Do what plan.md says."
AIDER = "read: plan.md\ngit: false\nmap-tokens: 0\nauto-lint: false\nstream: false\n"
NATIVE = {"tools": ["shell"], "system": "Work."}
MODEL_CALLS = 4
"""One more than the longest way needs: read, write, say that it is done."""


def task(name: str, word: str, file: str, draw: random.Random) -> dict[str, Any]:
    other = draw.choice([each for each in WORDS if each != word])
    return {
        "id": name,
        "instruction": INSTRUCTION,
        "files": {
            "plan.md": f"write {word}, not {other}, to {file}\n",
            "~/.aider.conf.yml": AIDER,
            "~/.native.json": json.dumps(NATIVE),
        },
        "verifier": {"command": f'test "$(cat {file})" = {word}', "timeout": 120},
        "timeout": 600,
        "max_turns": MODEL_CALLS,
        "domain": "agent",
        "metadata": {"word": word, "other": other, "file": file},
    }


def families(seed: int, sizes: dict[str, int]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name and the tasks of every file; no pair of word and file is in two of them."""
    draw = random.Random(seed)
    draw.shuffle(pairs := list(product(WORDS, (f"{file}.txt" for file in FILES))))
    rest = iter(pairs)
    for name, size in sizes.items():
        yield name, [task(f"{name}-{number}", *next(rest), draw) for number in range(size)]


def write(directory: Path, seed: int, sizes: dict[str, int], known: int) -> None:
    """Write warmup.jsonl, train.jsonl, and evaluated.jsonl: the tasks of `heldout`, and `known` of those of `train`.

    These are the ones that a run with this seed opens first, so that it trains them in its first steps.
    """
    directory.mkdir(parents=True)
    tasks = dict(families(seed, sizes))
    heldout = tasks.pop("heldout")
    for name, some in tasks.items():
        write_lines(directory / f"{name}.jsonl", some)
    order = load_sources([str(directory / "train.jsonl")]).mix.order(seed)
    first = {task.id for task in islice(order, known)}
    write_lines(directory / "evaluated.jsonl", heldout + [task for task in tasks["train"] if task["id"] in first])


def write_lines(file: Path, tasks: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(each) + "\n" for each in tasks))
