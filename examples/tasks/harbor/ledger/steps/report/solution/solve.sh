#!/bin/sh
set -e
cat > /app/report.py <<'PYTHON'
import sys

from ledger import read

sums = {}
for path in sys.argv[1:]:
    for account, cents, _text in read(path):
        sums[account] = sums.get(account, 0) + cents
for account in sorted(sums):
    print(f"{account} {sums[account] / 100:.2f}")
PYTHON
