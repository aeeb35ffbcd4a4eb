"""Long texts that are honest although much in them repeats, and texts of which that is too much to ask.

Agents write such texts: tables, data, code with equal lines. They are made here from a seed, so they are the same
every time. proxy/engine/repetition.py must end none of them; `ENDED` shows where it begins to.
"""

import base64
import json
import random
import zlib
from itertools import product
from typing import Any

WORDS = "parser token reads writes checks cuts the of a to and first last empty whole line list error value".split()


def _draw(seed: int = 0) -> random.Random:
    return random.Random(seed)


def _table(rows: int) -> str:
    lines = [f"| case {i} | passed | no error | 0.0 s |" for i in range(rows)]
    return "\n".join(["| name | state | message | time |", "| --- | --- | --- | --- |", *lines])


def _records(count: int) -> str:
    """Records that differ in their id alone."""
    same: dict[str, Any] = {"name": "", "state": "open", "tags": [], "owner": None, "checks": {"lint": True, "a": 0}}
    return json.dumps([{"id": i, **same} for i in range(count)], indent=2)


def _cases(count: int) -> str:
    case = "    def test_{0}(self):\n        parser = Parser()\n        self.assertEqual(parser.read('{0}'), {0})\n"
    return "class Tests(unittest.TestCase):\n" + "\n".join(case.format(i) for i in range(count))


def _unrolled(count: int) -> str:
    return "".join(f"    out[{i}] = a[{i}] * b[{i}] + c[{i}];\n" for i in range(count))


def _grades(rows: int) -> str:
    """A column of few values, most of them equal."""
    draw = _draw()
    return "name,grade\n" + "".join(f"{draw.choice(WORDS)},{draw.choice('AAAAAAB')}\n" for _ in range(rows))


def _bits(rows: int) -> str:
    draw = _draw()
    return "\n".join(" ".join(str(draw.randrange(2)) for _ in range(64)) for _ in range(rows))


def _bitmap(size: int) -> str:
    """An uncompressed picture of a disc, in base64."""
    half = size / 2
    inside = [(x - half) ** 2 + (y - half) ** 2 < half**2 / 2 for y, x in product(range(size), repeat=2)]
    return base64.b64encode(b"".join(b"\x20\x60\xff" if each else b"\xff\xff\xff" for each in inside)).decode()


def _dump(size: int) -> str:
    """A hex dump of a file that is mostly zeros."""
    draw = _draw()
    data = bytes(draw.randrange(256) if i % 512 < 16 else 0 for i in range(size))
    lines = [f"{at:08x}  {data[at : at + 16].hex(' ')}" for at in range(0, size, 16)]
    return "\n".join(lines)


def _board(size: int) -> str:
    row = "<tr>" + '<td class="cell"></td>' * size + "</tr>"
    return "<table>\n" + "\n".join([row] * size) + "\n</table>"


def _prose(words: int) -> str:
    draw = _draw()
    return " ".join(draw.choice(WORDS) for _ in range(words))


def _zeros(count: int) -> str:
    return "[" + ", ".join("0" * count) + "]"


HONEST = {
    "a table of 600 rows": _table(600),
    "300 records that differ in their id": _records(300),
    "200 test cases of one form": _cases(200),
    "an unrolled loop of 400 lines": _unrolled(400),
    "3,000 grades, most of them A": _grades(3000),
    "200 rows of 64 random bits": _bits(200),
    "24 KB of random bytes in base64": base64.b64encode(_draw().randbytes(24_000)).decode(),
    "24 KB of compressed text in base64": base64.b64encode(zlib.compress(_prose(60_000).encode())[:24_000]).decode(),
    "a bitmap of 32 x 32 in base64": _bitmap(32),
    "a hex dump of 16 KB, mostly zeros": _dump(16_384),
    "a board of 16 x 16 equal cells": _board(16),
    "20,000 words out of twenty": _prose(20_000),
    "the same paragraph of 80 words 20 times": "\n\n".join([_prose(80)] * 20),
    "the same line of code 200 times": "    total += check(parser.read(line))\n" * 200,
    "a list of 1,000 zeros": _zeros(1000),
    "a rule of 3,000 equal signs": "=" * 3000,
}
"""Name -> text. None of them may be ended."""
ENDED = {
    "a list of 5,000 zeros": _zeros(5000),
    "a board of 60 x 60 equal cells": _board(60),
    "the same paragraph of 80 words 120 times": "\n\n".join([_prose(80)] * 120),
    "the same line of code 1,000 times": "    total += check(parser.read(line))\n" * 1000,
    "1,000 rows with two values in turn": "  1  1.4\n  1  1.3\n" * 500,
}
"""The same with so much of it that it is taken for a loop."""
