"""`python benchmarks/signal.py`: runs benchmarks/signal_runs.

Python looks for modules in a script's own directory first. So this script takes that directory off the path, and for
other scripts here, which find this file where they import `signal`, it steps aside for the standard library's module.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).parent.parent
    sys.path[:1] = [str(root), str(root / "examples" / "demo")]
    from benchmarks.signal_runs.__main__ import main

    sys.exit(main())

if __name__ == "signal":
    from importlib.util import module_from_spec, spec_from_file_location
    from sysconfig import get_path

    spec = spec_from_file_location(__name__, Path(get_path("stdlib")) / "signal.py")
    assert spec is not None and spec.loader is not None
    sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])
