#!/bin/sh
set -e
cat > /app/ledger.py <<'PYTHON'
def read(path):
    """The entries of a ledger: (account, cents, text)."""
    with open(path) as file:
        lines = [line.rstrip("\n") for line in file]
    entries = []
    for line in lines:
        if line and not line.startswith("#"):
            account, amount, text = line.split(" ", 2)
            entries.append((account, round(float(amount) * 100), text))
    return entries
PYTHON
