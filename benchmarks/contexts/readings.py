"""Tasks that do not fit into a context of 512 tokens, so that nobody succeeds without notes.

"Read one.md, then two.md." The first file ends, for example, in `append apple`, the second in `write to log.txt`. The
verifier wants the word in that file. The rest of both files is digits, each a token, and both files together leave no
room for a further turn. No two tasks share word and file. The words stand at the end because a model of two layers
learns in minutes to copy from near by only.
"""

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tasks import FILES, WORDS

CONTEXT_TOKENS = 512
DIGITS = {"one.md": 285, "two.md": 70}
"""Digits in each file."""
SHARE = 0.65
"""Of the context, at which the agent asks for notes: 0.8 of it is full with the first file, half with the second."""
MODEL_CALLS = 4
"""Two to read, one for the notes, one to write."""
SIZES = {"warmup": 192, "train": 384, "heldout": 256}
INSTRUCTION = "Read one.md, then two.md."


def noise(count: int, end: str, draw: random.Random) -> str:
    """Digits with a text behind them."""
    return "".join(draw.choice("0123456789") for _ in range(count)) + f"\n{end}\n"


def task(name: str, word: str, file: str, draw: random.Random) -> dict[str, Any]:
    return {
        "id": name,
        "instruction": INSTRUCTION,
        "files": {
            "one.md": noise(DIGITS["one.md"], f"append {word}", draw),
            "two.md": noise(DIGITS["two.md"], f"write to {file}", draw),
        },
        "verifier": {"command": f'test "$(cat {file})" = {word}', "timeout": 60},
        "timeout": 300,
        "max_turns": MODEL_CALLS,
        "domain": "agent",
        "metadata": {"word": word, "file": file},
    }


def families(seed: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name and the tasks of every file; no pair of word and file is in two of them."""
    draw = random.Random(seed)
    draw.shuffle(pairs := list(product(WORDS, (f"{file}.txt" for file in FILES))))
    rest = iter(pairs)
    for name, size in SIZES.items():
        yield name, [task(f"{name}-{number}", *next(rest), draw) for number in range(size)]


def write(directory: Path, seed: int) -> None:
    """Write warmup.jsonl, train.jsonl and heldout.jsonl."""
    directory.mkdir(parents=True)
    for name, tasks in families(seed):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
