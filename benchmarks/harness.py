"""`python benchmarks/harness.py`: runs benchmarks/attempts.py.

Python looks for modules in a script's own directory first, and there this file would hide the package
`harness`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    from benchmarks.attempts import main

    sys.exit(main())
