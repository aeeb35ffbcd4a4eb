"""`python benchmarks/ceilings.py`: runs benchmarks/capacity.

Python looks for modules in a script's own directory first, and there benchmarks/sandboxes.py would hide the package
sandboxes.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    from benchmarks.capacity.__main__ import main

    sys.exit(main())
