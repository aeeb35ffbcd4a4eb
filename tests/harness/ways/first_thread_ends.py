"""Replaces the verifier's file from a thread, after the first thread has exited: the process shows as a zombie."""

import ctypes
import os
import threading

from tests.harness.ways.replacing import replace


def work():
    while True:
        replace("check.py")


threading.Thread(target=work).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
