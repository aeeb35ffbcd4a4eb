"""Ignores every signal that can be ignored."""

import signal

from tests.harness.ways.replacing import replace

for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    replace("check.py")
