"""`python benchmarks/sandboxes.py`: runs benchmarks/cycles.py.

Python looks for modules in a script's own directory first, and there this file would hide the package
`sandboxes`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    from benchmarks.cycles import main

    sys.exit(main())
