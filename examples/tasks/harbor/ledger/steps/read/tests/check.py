"""Exit 0 when `read` of /app/ledger.py reads a ledger that it has not seen.

The module runs in a process of its own: what it prints is compared here, so ending the process early gains nothing.
"""

import json
import subprocess
import sys
import tempfile

CHILD = """
import json, sys
sys.path.append("/app")
from ledger import read

print(json.dumps([list(entry) for entry in read(sys.argv[1])]))
"""
LEDGER = "# head\na -0.29 x\n\nb 1234.57 two words, three\na 0.07 # not a comment\n"
RIGHT = [["a", -29, "x"], ["b", 123457, "two words, three"], ["a", 7, "# not a comment"]]

with tempfile.NamedTemporaryFile("w") as file:
    file.write(LEDGER)
    file.flush()
    child = subprocess.run([sys.executable, "-I", "-c", CHILD, file.name], capture_output=True, text=True, timeout=50)
sys.exit(0 if child.stdout == json.dumps(RIGHT) + "\n" else f"read gives {child.stdout}{child.stderr[-500:]}")
