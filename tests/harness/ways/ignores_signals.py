"""Ignores every signal that can be ignored."""

import os
import signal


def replace(*names):
    for name in names:
        try:
            if os.path.exists(name):
                open(".new", "w").close()
                os.replace(".new", name)
        except OSError:
            pass


for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    replace("check.py")
