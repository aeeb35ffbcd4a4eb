"""`python -m sandboxes`: the console script."""

import sys

from sandboxes.cli import main

sys.exit(main())
