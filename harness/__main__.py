"""`python -m harness`: the console script."""

import sys

from harness.cli import main

sys.exit(main())
