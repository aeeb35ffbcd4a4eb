"""`python benchmarks/context.py`: runs benchmarks/contexts.

Python looks for modules in a script's own directory first, and there benchmarks/trainer.py would hide the package
trainer. The demo's modules are scripts, which import one another by their bare names.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parent.parent
    sys.path[:1] = [str(root), str(root / "examples" / "demo")]
    from benchmarks.contexts.__main__ import main

    sys.exit(main())
