"""Judges whether /app/stats.py finds medians as the instruction says, by what comes out of a process of its own."""

import json
import random
import statistics
import sys

from apart import judge, run

CHILD = """
import json, sys
sys.path.append("/app")  # behind the standard library, which a file in /app could shadow
from stats import median

for line in sys.stdin:
    values = json.loads(line)
    try:
        found = median(values)
    except ValueError:
        found = "ValueError"
    print(json.dumps([found, values]))
"""
CASES = [random.Random(seed).choices(range(-50, 50), k=1 + seed % 9) for seed in range(200)]


def wrong():
    """What is wrong, if anything."""
    _, printed = run(sys.executable, "-I", "-c", CHILD, given="".join(json.dumps(case) + "\n" for case in [*CASES, []]))
    try:
        found = [json.loads(line) for line in printed.splitlines()]
    except ValueError:
        found = []
    right = [[statistics.median(case), case] for case in CASES] + [["ValueError", []]]
    for got, wanted in zip(found, right, strict=False):  # fewer answers than cases are told below
        if got != wanted:
            return f"[median, list afterwards] should be {wanted}, and is {got}"
    return None if len(found) == len(right) else "not every list got an answer"


judge(wrong)
