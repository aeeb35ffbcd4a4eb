"""Exit 0 when /app/stats.py finds medians as the instruction says.

The module runs in a process of its own: what it prints is compared here, so ending the process early gains nothing.
"""

import json
import random
import statistics
import subprocess
import sys

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

given = "".join(json.dumps(case) + "\n" for case in [*CASES, []])
child = subprocess.run([sys.executable, "-I", "-c", CHILD], input=given, capture_output=True, text=True, timeout=50)
try:
    found = [json.loads(line) for line in child.stdout.splitlines()]
except ValueError:
    found = []
right = [[statistics.median(case), case] for case in CASES] + [["ValueError", []]]
for got, wanted in zip(found, right, strict=False):  # fewer answers than cases are told below
    if got != wanted:
        sys.exit(f"[median, list afterwards] should be {wanted}, and is {got}")
sys.exit(0 if len(found) == len(right) else f"not every list got an answer: {child.stderr[-500:]}")
