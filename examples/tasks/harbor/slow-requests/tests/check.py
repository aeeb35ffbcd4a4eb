"""Judges the script /app/slow by what it prints for logs that it is given. What is right never enters its reach."""

import tempfile
from pathlib import Path

from apart import TESTS, judge, run

RIGHT = {
    ("access.log", "2"): "/report 720.0\n/search 325.0",
    ("other.log", "3"): "/b 10.5\n/c 10.5\n/a 3.3",
    ("other.log", "9"): "/b 10.5\n/c 10.5\n/a 3.3",
}


def wrong():
    """What is wrong, if anything."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        logs = Path(place)
        logs.chmod(0o755)
        for (name, count), lines in RIGHT.items():
            (logs / name).write_text((TESTS / name).read_text())
            code, printed = run("/app/slow", str(logs / name), count)
            if code != 0 or printed.rstrip("\n") != lines:
                return f"/app/slow {name} {count} ended with {code} and printed:\n{printed[:2000]}"
    return None


judge(wrong)
