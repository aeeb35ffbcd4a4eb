#!/bin/sh
set -e
cat > /app/slow <<'PYTHON'
#!/usr/bin/env python3
import sys

times = {}
for line in open(sys.argv[1]):
    try:
        _method, path, status, milliseconds = line.rstrip("\n").split(" ")
        if int(status) < 500:
            times.setdefault(path, []).append(float(milliseconds))
    except ValueError:
        continue
means = {path: round(sum(taken) / len(taken), 1) for path, taken in times.items()}
for path in sorted(means, key=lambda path: (-means[path], path))[: int(sys.argv[2])]:
    print(path, means[path])
PYTHON
chmod +x /app/slow
