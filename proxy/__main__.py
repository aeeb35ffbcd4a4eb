"""`python -m proxy`: the same as the console script."""

import sys

from proxy.cli import main

sys.exit(main())
