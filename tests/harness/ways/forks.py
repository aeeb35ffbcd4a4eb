"""Is another process every moment, so that a list of processes is old when it is read."""

import os
import time

from tests.harness.ways.replacing import replace

while True:
    replace("check.py")
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        time.sleep(0.001)
