"""`python -m trainer`: the same as the console script."""

import sys

from trainer.commands.main import main

sys.exit(main())
