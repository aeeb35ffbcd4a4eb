"""`python -m trainer`: the same as the console script."""

import sys

from trainer.cli import main

sys.exit(main())
