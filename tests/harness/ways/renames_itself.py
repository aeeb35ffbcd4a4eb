"""Becomes a daemon that shows another name and no environment."""

import os
import sys

if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execve("/bin/sh", ["sshd", "-c", sys.argv[1]], {})
