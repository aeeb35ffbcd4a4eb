"""`python -m proxy`: the same as the console script."""

import sys

from proxy.commands.main import main

sys.exit(main())
