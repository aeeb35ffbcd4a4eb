"""`python benchmarks/trainer.py`: runs benchmarks/steps.py.

Python looks for modules in a script's own directory first, and there this file would hide the package
`trainer`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    from benchmarks.steps import main

    sys.exit(main())
