"""Judges /app/report.py by what it prints for two ledgers that it has not seen."""

import sys
import tempfile
from pathlib import Path

from apart import TESTS, judge, run

RIGHT = "a -3.00\nb 0.05\nc 1000.10"


def wrong():
    """What is wrong, if anything."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        ledgers = [Path(place) / name for name in ("one.ledger", "two.ledger")]
        Path(place).chmod(0o755)
        for ledger in ledgers:
            ledger.write_text((TESTS / ledger.name).read_text())
        _, printed = run(sys.executable, "/app/report.py", *map(str, ledgers))
    return None if printed.rstrip("\n") == RIGHT else f"report.py prints {printed[:2000]}"


judge(wrong)
