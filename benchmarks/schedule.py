"""`python benchmarks/schedule.py`: runs benchmarks/schedules.

Python looks for modules in a script's own directory first, and there benchmarks/trainer.py would hide the package
trainer.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    from benchmarks.schedules.__main__ import main

    sys.exit(main())
