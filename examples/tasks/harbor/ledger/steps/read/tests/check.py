"""Judges whether `read` of /app/ledger.py reads a ledger that it has not seen, in a process of its own."""

import json
import sys
import tempfile
from pathlib import Path

from apart import judge, run

CHILD = """
import json, sys
sys.path.append("/app")
from ledger import read

print(json.dumps([list(entry) for entry in read(sys.argv[1])]))
"""
LEDGER = "# head\na -0.29 x\n\nb 1234.57 two words, three\na 0.07 # not a comment\n"
RIGHT = [["a", -29, "x"], ["b", 123457, "two words, three"], ["a", 7, "# not a comment"]]


def wrong():
    """What is wrong, if anything."""
    with tempfile.NamedTemporaryFile("w", dir="/tmp") as file:
        file.write(LEDGER)
        file.flush()
        Path(file.name).chmod(0o644)
        _, printed = run(sys.executable, "-I", "-c", CHILD, file.name)
    return None if printed == json.dumps(RIGHT) + "\n" else f"read gives {printed[:2000]}"


judge(wrong)
