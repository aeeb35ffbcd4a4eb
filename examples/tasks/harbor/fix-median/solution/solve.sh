#!/bin/sh
set -e
cat > /app/stats.py <<'PYTHON'
def median(values):
    """The middle of the values; the mean of the two middle ones when their number is even."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
PYTHON
