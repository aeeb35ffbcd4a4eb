"""Takes every process that the limit allows."""

import os
import time

while True:
    try:
        os.fork()
    except OSError:
        time.sleep(1)
