"""`python benchmarks/gpu.py`: runs benchmarks/gpu_stages/run.py.

Python looks for modules in a script's own directory first, and there benchmarks/trainer.py would hide the package
`trainer`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)
    from benchmarks.gpu_stages.run import main

    sys.exit(main())
