"""The demo's terminal tasks: a note says what to do with a file, and the model has to read it to know.

"Do what plan.md says." takes two commands: `cat plan.md` prints, for example, "append apple to log.txt", and then
`echo apple >> log.txt` does it ("replace log.txt by apple" needs `echo apple > log.txt`). The prompt names only the
note; the verifier compares the file. No two tasks, of all three files, share verb, word and file. The tiny model's
tokenizer splits none of the words, so that copying a word is copying a token.

usage: python examples/demo/tasks.py DIRECTORY
"""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

WORDS = """apple pear plum lemon grape peach cherry olive carrot bean corn rice bread cake honey milk salt pepper tea
coffee river lake hill stone sand cloud rain snow wind storm moon star fire tree leaf root seed flower grass rose dog
horse cow sheep goat duck fox wolf bear lion tiger mouse fish frog bird eagle gold silver iron glass paper wood lamp
table""".split()
FILES = "log list data notes items stock store index record book page draft memo names report journal".split()
NOTES = "plan todo task job order next work step goal brief request ticket".split()
VERBS = {"append": "append {word} to {file}", "replace": "replace {file} by {word}"}
SIZES = {"warmup": 192, "train": 512, "heldout": 256}
"""Tasks per file: for the teacher, for reinforcement, and for evaluation, which is never trained on."""


@dataclass(frozen=True)
class FileEdit:
    """What a note asks for."""

    verb: str
    word: str
    file: str

    @property
    def text(self) -> str:
        return VERBS[self.verb].format(word=self.word, file=self.file)

    def after(self, before: str) -> str:
        """Return what the file must hold in the end, given what it held before."""
        return f"{before}\n{self.word}" if self.verb == "append" else self.word


def edits(seed: int) -> list[FileEdit]:
    """Return all combinations, ordered so that every word comes once before any comes again."""
    draw = random.Random(seed)
    rounds: dict[str, list[FileEdit]] = {}
    for word in WORDS:
        rounds[word] = [FileEdit(verb, word, f"{file}.txt") for verb, file in product(VERBS, FILES)]
        draw.shuffle(rounds[word])
    ordered = []
    for _ in range(len(VERBS) * len(FILES)):
        draw.shuffle(words := list(WORDS))
        ordered += [rounds[word].pop() for word in words]
    return ordered


def task(name: str, edit: FileEdit, draw: random.Random) -> dict[str, Any]:
    note, before = f"{draw.choice(NOTES)}.md", draw.choice([word for word in WORDS if word != edit.word])
    expected = edit.after(before).replace("\n", "\\n")
    return {
        "id": name,
        "instruction": f"Do what {note} says.",
        "files": {note: f"{edit.text}\n", edit.file: f"{before}\n"},
        "verifier": {"command": f'test "$(cat {edit.file})" = "$(printf \'{expected}\')"', "timeout": 10},
        "timeout": 60,
        "domain": "agent",
        "metadata": {"verb": edit.verb, "word": edit.word, "file": edit.file},
    }


def families(seed: int = 0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the name and the tasks of every file; no combination is in two of them."""
    draw, rest = random.Random(seed), iter(edits(seed))
    for name, size in SIZES.items():
        yield name, [task(f"{name}-{number}", next(rest), draw) for number in range(size)]


def write(directory: Path, seed: int = 0) -> None:
    """Write warmup.jsonl, train.jsonl and heldout.jsonl. The same seed gives the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, tasks in families(seed):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
