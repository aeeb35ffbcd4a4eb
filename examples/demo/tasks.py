"""The demo's family of terminal tasks: a note says what to do with a file, and only reading it tells.

"Do what plan.md says." needs two commands: `cat plan.md` prints, say, "append apple to log.txt", and then
`echo apple >> log.txt` does it ("replace log.txt by apple" wants `echo apple > log.txt`). The prompt names only the
note; the verifier compares the file. No two tasks of the three files ask for the same with the same word and file.
Left out: any word that the tiny model's tokenizer splits, so that copying a word is copying a token.

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
"""Tasks per file: those that the teacher shows (twice each, so that its slips cannot be learned by heart), those of the
reinforcement loop, and those that are never trained."""


@dataclass(frozen=True)
class Deed:
    """What a note asks for."""

    verb: str
    word: str
    file: str

    @property
    def text(self) -> str:
        return VERBS[self.verb].format(word=self.word, file=self.file)

    def after(self, before: str) -> str:
        """What the file must hold in the end."""
        return f"{before}\n{self.word}" if self.verb == "append" else self.word


def deeds(seed: int) -> list[Deed]:
    """All combinations in an order in which every word comes once before any comes again."""
    draw = random.Random(seed)
    rounds: dict[str, list[Deed]] = {}
    for word in WORDS:
        rounds[word] = [Deed(verb, word, f"{file}.txt") for verb, file in product(VERBS, FILES)]
        draw.shuffle(rounds[word])
    ordered = []
    for _ in range(len(VERBS) * len(FILES)):
        draw.shuffle(words := list(WORDS))
        ordered += [rounds[word].pop() for word in words]
    return ordered


def task(name: str, deed: Deed, draw: random.Random) -> dict[str, Any]:
    note, before = f"{draw.choice(NOTES)}.md", draw.choice([word for word in WORDS if word != deed.word])
    wanted = deed.after(before).replace("\n", "\\n")
    return {
        "id": name,
        "instruction": f"Do what {note} says.",
        "files": {note: f"{deed.text}\n", deed.file: f"{before}\n"},
        "verifier": {"command": f'test "$(cat {deed.file})" = "$(printf \'{wanted}\')"', "timeout": 10},
        "timeout": 60,
        "domain": "agent",
        "metadata": {"verb": deed.verb, "word": deed.word, "file": deed.file},
    }


def families(seed: int = 0) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The name and the tasks of every file, with no combination in two of them."""
    draw, rest = random.Random(seed), iter(deeds(seed))
    for name, size in SIZES.items():
        yield name, [task(f"{name}-{number}", next(rest), draw) for number in range(size)]


def write(directory: Path, seed: int = 0) -> None:
    """Write warmup.jsonl, train.jsonl and heldout.jsonl: the same bytes for the same seed."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, tasks in families(seed):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
