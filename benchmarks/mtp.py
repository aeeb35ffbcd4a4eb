"""`python benchmarks/mtp.py`: see benchmarks/drafting.py, which does the work.

A script's own directory comes first where Python looks for modules, and there benchmarks/trainer.py would stand for the
package `trainer`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    from benchmarks.drafting import main

    sys.exit(main())
