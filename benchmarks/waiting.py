"""`python benchmarks/waiting.py`: runs benchmarks/capacity/waiting.py.

Python looks for modules in a script's own directory first, and there benchmarks/harness.py would hide the package
harness.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    from benchmarks.capacity.waiting import main

    sys.exit(main())
