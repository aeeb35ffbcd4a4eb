"""Two processes that wake each other when somebody stops one."""

import os
import signal

from tests.harness.ways.replacing import replace

parent = os.getpid()
other = os.fork() or parent
while True:
    replace("check.py")
    os.kill(other, signal.SIGCONT)
