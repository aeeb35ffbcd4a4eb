"""Measure the rule that ends answers which repeat themselves (proxy/engine/repetition.py): one JSON object.

False alarms: over the replies of recorded agents, over files that people and programs wrote, and over honest texts in
which much repeats. Loops: after how many tokens they are ended, by their length and by how often the policy slips.
Cost: time per token. docs/behaviour.md explains the figures. Left out: answers of models that were trained here.
"""

import argparse
import hashlib
import os
import platform
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from array import array
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from tokenizers import Tokenizer

from benchmarks.honest_texts import ENDED, HONEST
from proxy.engine.repetition import BLOCK, RepetitionWatch
from proxy.engine.tiny_model import make_tiny_model
from tests.captures.player import written
from tests.captures.recorded import sessions

ROOT = Path(__file__).parent.parent
LONGEST = 32_768
"""Tokens of an answer; of a longer file, each part of so many tokens counts as one."""
SMALLEST, LARGEST = 8_000, 1_000_000
"""Bytes of the files that are read."""
VOCABULARY = 2000


def main() -> int:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; few files")
    parser.add_argument("--tokenizer", type=Path, action="append", default=[], help="a tokenizer.json to use, too")
    parser.add_argument("--out", type=Path, help="also write the object here")
    arguments = parser.parse_args()
    command = ["-m benchmarks.repetition", *sys.argv[1:]]
    figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "command": " ".join(command)}
    figures["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder))
        tokenizers = {"tiny": Tokenizer.from_file(f"{folder}/tokenizer.json")}
    tokenizers |= {path.stem: Tokenizer.from_file(str(path)) for path in arguments.tokenizer}
    files = _files(40 if arguments.quick else 5000)
    figures["texts"] = {name: _texts(tokenizer, files) for name, tokenizer in tokenizers.items()}
    figures["loops"] = _loops(3 if arguments.quick else 30)
    figures["ns_per_token"] = {f"{size} per event": _cost(size) for size in (1, 8, 64)}
    line = msgspec.json.encode(figures)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.format(line, indent=2) + b"\n")
    print(line.decode(), flush=True)
    return 0


# ---- false alarms


def _texts(tokenizer: Tokenizer, files: dict[str, str]) -> dict[str, Any]:
    """What the rule says of honest texts in the tokens of one tokenizer."""
    replies = [written(each.reply) for session in sessions() for each in session.exchanges if each.reply]
    return {
        "recorded": _judged(tokenizer, {str(number): text for number, text in enumerate(replies)}),
        "files": _judged(tokenizer, files),
        "honest": {name: _most(_ids(tokenizer, text)) for name, text in HONEST.items()},
        "ended": {name: _end(_ids(tokenizer, text)) for name, text in ENDED.items()},
    }


def _judged(tokenizer: Tokenizer, texts: dict[str, str]) -> dict[str, Any]:
    """Counts of answers, of those that are long enough to be ended, and the names of those that would be."""
    answers = tokens = long = 0
    alarms = []
    for name, text in texts.items():
        ids = _ids(tokenizer, text)
        for start in range(0, max(1, len(ids)), LONGEST):
            answer = ids[start : start + LONGEST]
            answers, tokens, long = answers + 1, tokens + len(answer), long + (len(answer) > 60 * BLOCK)
            if (end := _end(answer)) is not None:
                alarms.append(f"{name}: token {start + end}")
    return {"answers": answers, "long_answers": long, "tokens": tokens, "alarms": alarms}


def _ids(tokenizer: Tokenizer, text: str) -> "array[int]":
    return array("i", tokenizer.encode(text, add_special_tokens=False).ids)


def _end(ids: "array[int]") -> int | None:
    return RepetitionWatch().end(ids, len(ids))


def _most(ids: "array[int]") -> dict[str, Any]:
    """The tokens of a text, the most of its blocks that repeat among those remembered, and whether it is ended."""
    watch, most = RepetitionWatch(), 0
    for size in range(BLOCK, len(ids) + 1, BLOCK):
        watch.end(ids, size)
        most = max(most, watch.repeats.bit_count())
    return {"tokens": len(ids), "most_repeated": most, "ended": _end(ids) is not None}


def _files(count: int) -> dict[str, str]:
    """Draw text files of this repository, of Python's library and of the installed packages; return them by name."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = {name: ROOT / name for name in tracked.splitlines()}
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    of_python = (path for path in library.rglob("*") if "site-packages" not in path.relative_to(library).parts)
    paths |= {str(path.relative_to(library.parent)): path for path in of_python}
    paths |= {str(path.relative_to(packages.parent)): path for path in packages.rglob("*")}
    texts = ((name, _text(paths[name])) for name in drawn(paths))
    return dict(islice(((name, text) for name, text in texts if text is not None), count))


def drawn(names: Iterable[str]) -> list[str]:
    """Return names in the order of their digests, as if shuffled. One more name changes the order of no others.

    A shuffle would: a byte code cache, or one more package, would draw other files.
    """
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def _text(path: Path) -> str | None:
    """What stands in a file; None for one that is no text, has not the right size, or is gone."""
    try:
        if not (path.is_file() and SMALLEST < path.stat().st_size < LARGEST):
            return None
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text


# ---- loops


def _loops(rounds: int) -> dict[str, Any]:
    """By the length of a loop and the tokens between two slips: the median of tokens until it is ended, and the share
    of answers of 32,768 tokens that are ended."""
    found = {}
    for period in (1, 7, 50, 200, 256, 300):
        for gap in (0, 2000, 1000, 500, 250):
            ends = [_end(_loop(period, gap, random.Random(seed))) for seed in range(rounds)]
            known = [end for end in ends if end is not None]
            name = f"{period} tokens, " + (f"a slip in {gap}" if gap else "no slip")
            found[name] = {"ended": len(known) / rounds, "tokens": median(known) if known else None}
    return found


def _loop(period: int, gap: int, draw: random.Random) -> "array[int]":
    """100 tokens of text, then a loop. A slip puts up to 10 other tokens in and begins the loop again."""
    ids = array("i", (draw.randrange(VOCABULARY) for _ in range(100)))
    passage = [draw.randrange(VOCABULARY) for _ in range(period)]
    place = 0
    while len(ids) < LONGEST:
        ids.append(passage[place % period])
        place += 1
        if gap and draw.random() < 1 / gap:
            ids.extend(draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 11)))
            place = 0
    return ids[:LONGEST]


# ---- cost


def _cost(size: int) -> float:
    """CPU nanoseconds per token of an honest answer in events of `size` tokens, the least of five times."""
    draw, best = random.Random(0), float("inf")
    ids = array("i", (draw.randrange(VOCABULARY) for _ in range(LONGEST)))
    for _ in range(5):
        watch, started = RepetitionWatch(), time.thread_time_ns()
        for end in range(size, LONGEST + 1, size):
            watch.end(ids, end)
        best = min(best, (time.thread_time_ns() - started) / LONGEST)
    return round(best, 1)


if __name__ == "__main__":
    sys.exit(main())
